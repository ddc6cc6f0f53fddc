"""`quantize`: a checkpoint to W8A8, written for other engines and for later runs of `generate`."""

import logging
import shutil
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from jobs.cli import parse_quantize, say
from jobs.evaluate import evaluate
from jobs.folders import new_folder
from jobs.prompts import check_lengths, read_prompts
from pipeline.admission import load_tokenizer
from pipeline.calibration import read_calibration
from pipeline.config import QuantizeConfig
from pipeline.errors import InputError
from pipeline.sources import check_source, find_sources
from quant.checkpoint import Checkpoint, open_checkpoint
from quant.compressed import partial_folder, read_report
from quant.errors import CheckpointError
from quant.hub import find_checkpoint
from quant.prepare import (
    cached_folder,
    is_cached,
    prepared,
    quantize_checkpoint,
    recipe_digest,
)

_PROGRESS_SECONDS = 10.0


def quantize(arguments: Sequence[str]) -> int:
    """Convert and write; returns the exit code. Raises InputError or CheckpointError for bad input."""
    config = parse_quantize(arguments)
    sources = find_sources(config.evaluate)
    if config.quant.calibration:
        check_source(config.quant.calibration)
    output = new_folder(config.output)
    folder = find_checkpoint(config.model).resolve()
    checkpoint = open_checkpoint(folder)
    if checkpoint.is_quantized:
        raise CheckpointError(f"{folder}: already quantized; give the original checkpoint")
    tokenizer = load_tokenizer(folder)
    prompts = [
        prompt
        for uri in sources.uris
        for prompt in islice(
            read_prompts(uri, tokenizer, "evaluate"), config.num_evaluation_samples
        )
    ]
    check_lengths(prompts, config.max_tokens, checkpoint.architecture.max_position_embeddings)
    started = time.monotonic()
    try:
        _convert(config, checkpoint, tokenizer, output)
    except KeyboardInterrupt:
        say("interrupted; nothing was written")
        return 4
    print(format_report(output, time.monotonic() - started))
    if prompts:
        evaluate(config, checkpoint, tokenizer, prompts, output)
    return 0


def _convert(config: QuantizeConfig, checkpoint: Checkpoint, tokenizer: Any, output: Path) -> None:
    """Quantize to `output`; what was calibrated stays in the cache, where `generate` finds it."""
    texts = read_calibration(config.quant, tokenizer)
    digest = recipe_digest(checkpoint, config.quant, texts)
    if texts and is_cached(digest):
        say(f"the weights are in the cache: {cached_folder(digest)}")
    elif texts:
        say(f"calibrating on {sum(map(len, texts))} tokens of {len(texts)} texts")
        _show_progress()
    partial = partial_folder(output)
    try:
        with prepared(checkpoint, config.quant, texts, digest) as made:
            if made.is_quantized:
                shutil.copytree(made.folder, partial, dirs_exist_ok=True)
                partial.rename(output)
            else:
                quantize_checkpoint(checkpoint, config.quant, texts, digest, output)
    except OSError as error:
        raise InputError(f"output {config.output}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _show_progress() -> None:
    """Say which layer the calibration is at, no more than every few seconds."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(_Sparingly())
    logger = logging.getLogger("quant.calibrate")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


class _Sparingly(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:  # noqa: ARG002 - logging's signature
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + _PROGRESS_SECONDS
        return True


def format_report(folder: Path, seconds: float) -> str:
    """What was made, in a few lines for people."""
    report = read_report(folder)
    assert report is not None, "write_quantized always writes one"
    fidelity = report["fidelity_on_calibration_texts"]
    kept = report["float_linears"]
    lines = {
        "recipe": report["recipe"]["recipe"],
        "int8": f"{report['int8_share_of_linears']:.1%} of the linear weights",
        "in bf16": ", ".join(kept) or "none of the linears; the head and the embeddings",
        "fidelity": f"{fidelity['top1_agreement']:.2%} ± {fidelity['top1_agreement_standard_error']:.2%} "
        "of first choices agree with float32, mean KL "
        f"{fidelity['mean_kl']:.5f} ({fidelity['num_tokens']} tokens of calibration texts)"
        if fidelity
        else "not measured (no calibration)",
        "digest": report["digest"],
        "time": f"{seconds:.0f} s",
        "output": str(folder),
    }
    return "\n".join(f"{key:>8}  {value}" for key, value in lines.items())
