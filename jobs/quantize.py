"""`quantize`: a checkpoint to W8A8, written for other engines and for later runs of `generate`."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs.cli import parse_quantize, say
from jobs.evaluate import evaluate, read_prompts
from pipeline.admission import load_tokenizer
from pipeline.calibration import read_calibration
from pipeline.config import QuantizeConfig
from pipeline.errors import InputError
from pipeline.sources import check_source
from pipeline.storage import is_writable
from quant.checkpoint import open_checkpoint
from quant.compressed import read_report
from quant.errors import CheckpointError
from quant.hub import find_checkpoint
from quant.prepare import prepared, quantize_checkpoint, recipe_digest


def quantize(arguments: Sequence[str]) -> int:
    """Convert and write; returns the exit code. Raises InputError or CheckpointError for bad input."""
    config = parse_quantize(arguments)
    for uri in (*config.evaluate, *filter(None, [config.quant.calibration])):
        check_source(uri)
    output = _check_output(config.output)
    folder = find_checkpoint(config.model).resolve()
    tokenizer = load_tokenizer(folder)
    prompts = [prompt for uri in config.evaluate for prompt in read_prompts(uri, config, tokenizer)]
    started = time.monotonic()
    _convert(config, folder, tokenizer, output)
    print(format_report(output, time.monotonic() - started))
    if prompts:
        evaluate(config, open_checkpoint(folder), tokenizer, prompts, output)
    return 0


def _check_output(output: str) -> Path:
    path = Path(output).expanduser()
    if path.is_file():
        raise InputError(f"output {output}: is a file, not a folder")
    if path.is_dir() and any(path.iterdir()):
        raise InputError(f"output {output}: is not empty")
    if not is_writable(str(path)):
        raise InputError(f"output {output}: cannot be written to")
    return path.absolute()


def _convert(config: QuantizeConfig, folder: Path, tokenizer: Any, output: Path) -> None:
    """Quantize to `output`; what was calibrated stays in the cache, where `generate` finds it."""
    checkpoint = open_checkpoint(folder)
    if checkpoint.is_quantized:
        raise CheckpointError(f"{folder}: already quantized; give the original checkpoint")
    texts = read_calibration(config.quant, tokenizer)
    if texts:
        say(f"calibrating on {sum(map(len, texts))} tokens of {len(texts)} texts")
    digest = recipe_digest(checkpoint, config.quant, texts)
    partial = output.with_name(f".{output.name}.{digest[:8]}.partial")
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
        "fidelity": f"{fidelity['top1_agreement']:.2%} of first choices agree with float32, mean KL "
        f"{fidelity['mean_kl']:.5f} ({fidelity['num_tokens']} tokens of calibration texts)"
        if fidelity
        else "not measured (no calibration)",
        "digest": report["digest"],
        "time": f"{seconds:.0f} s",
        "output": str(folder),
    }
    return "\n".join(f"{key:>8}  {value}" for key, value in lines.items())
