"""A checkpoint and a recipe to a quantized checkpoint: calibrated once, kept in the machine's cache.

The result is named by its content: source, recipe, calibration texts and code version. `jobs quantize`
writes it for other engines to read, and a run of `jobs generate` starts from the same folder.
"""

import contextlib
import errno
import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from quant.allocator import keeping_freed_memory
from quant.cache import cache_folder
from quant.calibrate import Text, Treatment, treat
from quant.checkpoint import Checkpoint, open_checkpoint
from quant.compressed import float_linears, read_report, write_quantized
from quant.config import QuantConfig
from quant.errors import CheckpointError
from quant.fallback import choose_float_groups
from quant.fidelity import Fidelity
from quant.quantize import ROUND_TO_NEAREST

# Part of the digests: raise it whenever the tensors made from the same checkpoint change.
CODE_VERSION = 4

# Not the recipe's: how the weights run, and where the texts came from.
_LEAVES_OUT = {"precision", "calibration"}
_LOGGER = logging.getLogger(__name__)


def recipe_digest(checkpoint: Checkpoint, config: QuantConfig, texts: Sequence[Text]) -> str:
    """Name a quantized checkpoint by what it is made of (sha256, hex)."""
    return _digest(checkpoint.digest(), _recipe(config), [list(text) for text in texts])


def weights_digest(config: QuantConfig, recipe: str) -> str:
    """Name the weights a worker holds: `recipe` (from `recipe_digest`), and the precision."""
    return _digest(recipe, config.precision)


@contextlib.contextmanager
def prepared(
    checkpoint: Checkpoint, config: QuantConfig, texts: Sequence[Text], digest: str
) -> Iterator[Checkpoint]:
    """The checkpoint to load: calibrated and quantized, from the cache; made first if it is not there.

    What is quantized already, or needs no calibration, comes as it is: rounding to nearest costs no more
    than reading. If the cache cannot be written, the quantized checkpoint lasts as long as the context.

    Args:
        checkpoint: the source.
        config: the recipe.
        texts: to calibrate on.
        digest: `recipe_digest` of the three.
    """
    if checkpoint.is_quantized or not config.needs_calibration:
        yield checkpoint
        return
    with contextlib.ExitStack() as stack:
        folder = cached_folder(digest)
        made = _open_cached(folder) if is_cached(digest) else None
        if made is None:
            if not _is_writable(folder.parent):
                _LOGGER.warning(
                    "%s cannot be written to, so the weights are not kept", folder.parent
                )
                temporary = tempfile.TemporaryDirectory(prefix="quasar-weights-")
                folder = Path(stack.enter_context(temporary)) / digest[:32]
            try:
                quantize_checkpoint(checkpoint, config, texts, digest, folder)
            except OSError as error:
                raise CheckpointError(f"{folder}: weights cannot be written ({error})") from error
        yield made or open_checkpoint(folder)


def _open_cached(folder: Path) -> Checkpoint | None:
    """A quantized checkpoint of the cache; None, and it is gone, if it is damaged."""
    try:
        made = open_checkpoint(folder)
        read_report(folder)
    except CheckpointError as error:
        _LOGGER.warning("damaged in the cache, made again: %s", error)
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return made


def is_cached(digest: str) -> bool:
    """Whether the quantized checkpoint of a `recipe_digest` is in this machine's cache."""
    try:
        return (cached_folder(digest) / "config.json").is_file()
    except OSError:  # A folder that may not be searched.
        return False


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def cached_folder(digest: str) -> Path:
    """Where the cache keeps the quantized checkpoint of a `recipe_digest`, once it is made."""
    return cache_folder() / "weights" / digest[:32]


def quantize_checkpoint(
    checkpoint: Checkpoint, config: QuantConfig, texts: Sequence[Text], digest: str, folder: Path
) -> None:
    """Calibrate, and write the quantized checkpoint to `folder`; raises as `write_quantized` does."""
    treatment, fidelity = calibrate(checkpoint, config, texts)
    report = _describe(checkpoint, config, texts, treatment, fidelity) | {"digest": digest}
    try:
        write_quantized(checkpoint, config, treatment, folder, report)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or read_digest(folder) != digest:
            raise
        _LOGGER.info("%s was written by another process meanwhile", folder)


def read_digest(folder: Path) -> str | None:
    """The recipe digest of a folder that this project wrote; None if it is none."""
    report = read_report(folder) if folder.is_dir() else None
    return None if report is None else str(report.get("digest"))


def calibrate(
    checkpoint: Checkpoint, config: QuantConfig, texts: Sequence[Text]
) -> tuple[Treatment, Fidelity | None]:
    """The recipe's treatment of a checkpoint, and how close the quantized model is to the original.

    Without calibration `texts` may be empty, and nothing is measured.

    Raises:
        CheckpointError: a tensor cannot be read, or no text has two tokens.
    """
    if not config.needs_calibration:
        return ROUND_TO_NEAREST, None
    texts = [text for text in texts if len(text) > 1]
    if not texts:
        raise CheckpointError("no calibration text has more than one token")
    with torch.no_grad(), keeping_freed_memory():
        treatment = treat(checkpoint, texts, config)
        return choose_float_groups(checkpoint, config, treatment, texts)


def report_of(checkpoint: Checkpoint, config: QuantConfig) -> dict[str, Any]:
    """How the weights are made that `checkpoint`, as `prepared` gives it, is loaded as."""
    if config.precision != "w8a8":
        return {}
    if checkpoint.is_quantized:
        return read_report(checkpoint.folder) or {}
    return _describe(checkpoint, config, (), ROUND_TO_NEAREST, None)


def _describe(
    checkpoint: Checkpoint,
    config: QuantConfig,
    texts: Sequence[Text],
    treatment: Treatment,
    fidelity: Fidelity | None,
) -> dict[str, Any]:
    """How a quantized checkpoint was made, and what quantization costs each group of linears."""
    in_float = [e for e in treatment.errors if (e.layer, e.group) in treatment.float_groups]
    num_weights = sum(e.num_weights for e in treatment.errors)
    num_float = sum(e.num_weights for e in in_float)
    return {
        "code_version": CODE_VERSION,
        "recipe": _recipe(config),
        "calibration": {"num_texts": len(texts), "num_tokens": sum(map(len, texts))},
        "int8_share_of_linears": 1 - num_float / num_weights if num_weights else 1.0,
        "float_linears": float_linears(checkpoint, treatment),
        "fidelity_on_calibration_texts": fidelity and fidelity.to_dict(),
        "relative_errors": [
            {"layer": e.layer, "linears": e.group, "output": e.output, "stream": e.stream}
            for e in treatment.errors
        ],
    }


def _recipe(config: QuantConfig) -> dict[str, Any]:
    return config.model_dump(exclude=_LEAVES_OUT)


def _digest(*content: Any) -> str:
    encoded = json.dumps([*content, CODE_VERSION], sort_keys=True).encode()
    return hashlib.sha256(encoded).hexdigest()
