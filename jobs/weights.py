"""A model's weights in this process, for commands that need no cluster."""

from collections.abc import Sequence
from typing import Any

from jobs.cli import say
from pipeline.calibration import read_calibration
from quant.calibrate import Text
from quant.checkpoint import Checkpoint
from quant.config import QuantConfig
from quant.convert import Piece, convert
from quant.prepare import is_cached, prepared, recipe_digest


def load_pieces(checkpoint: Checkpoint, recipe: QuantConfig, tokenizer: Any) -> list[Piece]:
    """The pieces of a model; calibrated first, unless the cache has the weights or needs none."""
    if recipe.precision != "w8a8" or checkpoint.is_quantized:
        return list(convert(checkpoint, recipe))
    texts = read_calibration(recipe, tokenizer)
    return prepare_pieces(checkpoint, recipe, texts, recipe_digest(checkpoint, recipe, texts))


def prepare_pieces(
    checkpoint: Checkpoint, recipe: QuantConfig, texts: Sequence[Text], digest: str
) -> list[Piece]:
    """The pieces of a model whose calibration texts and `recipe_digest` are known."""
    if texts and not is_cached(digest):
        say(f"calibrating on {sum(map(len, texts))} tokens; the weights are kept in the cache")
    with prepared(checkpoint, recipe, texts, digest) as made:
        return list(convert(made, recipe))
