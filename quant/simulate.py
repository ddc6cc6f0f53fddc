"""The quantized decoder over whole texts, simulated in float32 a layer at a time.

What calibration chooses by. The model that generates computes the same products in integers, so that
the two differ by float32 rounding only.

Legend: T positions of all texts, C model width, V vocabulary.
"""

import operator
from collections.abc import Sequence
from functools import reduce

import torch
import torch.nn.functional as F

from quant.calibrate import Text, Treatment, embed
from quant.checkpoint import EMBEDDINGS, FINAL_NORM, HEAD, Checkpoint, LinearGroup
from quant.config import QuantConfig
from quant.decoder import (
    Apply,
    LayerTensors,
    forward_layer,
    fused_bias,
    fused_scale,
    fused_weight,
    rms_norm,
)
from quant.fidelity import Fidelity, compare
from quant.int8 import activation_code, dequantize_rows, quantize_rows, round_rows
from quant.quantize import layer_tensors

_BLOCK = 16384  # Rows of the head at work at once.


def measure(
    checkpoint: Checkpoint,
    config: QuantConfig,
    treatment: Treatment,
    texts: Sequence[Text],
    reference_TC: torch.Tensor,
) -> Fidelity:
    """The quantized model against the original, whose normed last states [T, C] are given."""
    got_TC = run_texts(checkpoint, config, treatment, texts)
    head, reference = Head(checkpoint, config), Head(checkpoint, config.reference())
    lengths = [len(text) for text in texts]
    states = zip(texts, reference_TC.split(lengths), got_TC.split(lengths), strict=True)
    return reduce(
        operator.add,
        (
            compare(reference(ref_TC[:-1]), head(text_TC[:-1]), torch.tensor(text[1:]))
            for text, ref_TC, text_TC in states
        ),
    )


def run_texts(
    checkpoint: Checkpoint, config: QuantConfig, treatment: Treatment, texts: Sequence[Text]
) -> torch.Tensor:
    """The normed last states [T, C] of the model that `config` and the treatment make, in float32."""
    architecture = checkpoint.architecture
    lengths = [len(text) for text in texts]
    x_TC = embed(checkpoint, texts)
    if config.precision == "w8a8":
        x_TC = round_rows(x_TC) if config.embeddings == "int8" else x_TC.bfloat16().float()
    for index in range(architecture.num_layers):
        layer = layer_tensors(checkpoint, config, treatment, index)
        apply = _apply(layer, config)
        layer = {name: t.float() for name, t in layer.items() if t.dim() == 1}  # The norms.
        x_TC = forward_layer(layer, architecture, index, x_TC, lengths, apply)
    return rms_norm(x_TC, checkpoint.read(FINAL_NORM).float(), architecture.norm_eps)


def _apply(layer: LayerTensors, config: QuantConfig) -> Apply:
    def apply(group: LinearGroup, x_TK: torch.Tensor) -> torch.Tensor:
        weight_JK, bias_J = fused_weight(layer, group), fused_bias(layer, group)
        if weight_JK.dtype == torch.int8:
            weight_JK = dequantize_rows(weight_JK, fused_scale(layer, group))
            x_TK = round_rows(x_TK, activation_code(config, group.name, x_TK.shape[1]))
        return F.linear(x_TK, weight_JK.float(), None if bias_J is None else bias_J.float())

    return apply


class Head:
    """The head that `config` makes."""

    def __init__(self, checkpoint: Checkpoint, config: QuantConfig) -> None:
        name = EMBEDDINGS if checkpoint.architecture.tied_head else HEAD
        weight_VC = checkpoint.read(name)
        self._max_code: int | None = None
        self._scale_V: torch.Tensor | None = None
        if config.precision == "w8a8" and config.head == "int8":
            self._max_code = activation_code(config, "head", weight_VC.shape[1])
            weight_VC, self._scale_V = quantize_rows(weight_VC)
        self._weight_VC = weight_VC

    def __call__(self, x_TC: torch.Tensor) -> torch.Tensor:
        """Logits [T, V]."""
        x_TC = x_TC if self._max_code is None else round_rows(x_TC, self._max_code)
        starts = range(0, len(self._weight_VC), _BLOCK)
        blocks = (self._block(slice(start, start + _BLOCK)) for start in starts)
        return torch.cat([F.linear(x_TC, block_VC) for block_VC in blocks], dim=1)

    def _block(self, rows: slice) -> torch.Tensor:
        """Some rows of the weights in float32; all of them would be the largest tensor there is."""
        weight_VC = self._weight_VC[rows]
        if self._scale_V is None:
            return weight_VC.float()
        return dequantize_rows(weight_VC, self._scale_V[rows])
