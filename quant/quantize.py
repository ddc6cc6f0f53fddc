"""A layer's tensors as they are run and stored: smoothed, int8 where the treatment says so.

Legend: N output channels, K input channels.
"""

import torch

from quant.calibrate import Treatment
from quant.checkpoint import Checkpoint, LinearGroup, layer_names, linear_groups
from quant.config import QuantConfig
from quant.decoder import LayerTensors, read_layer
from quant.int8 import quantize_rows
from quant.smooth import smooth_

ROUND_TO_NEAREST = Treatment()


def layer_tensors(
    checkpoint: Checkpoint, config: QuantConfig, treatment: Treatment, index: int
) -> LayerTensors:
    """The tensors of a layer by their names within it.

    A quantized linear X is `X.weight` int8 [N, K] and `X.weight_scale` float32 [N, 1]; everything else is
    in the checkpoint's dtype, linears that w8a8 leaves in floating point in bfloat16.
    """
    if checkpoint.is_quantized:
        return _stored(checkpoint, index)
    if config.precision != "w8a8":
        return read_layer(checkpoint, index)
    layer = read_layer(checkpoint, index, torch.float32)
    if treatment.scales:
        smooth_(layer, checkpoint.architecture, treatment.scales[index])
    for group in linear_groups(checkpoint.architecture):
        if (index, group.name) in treatment.float_groups:
            for linear in group.linears:
                layer[f"{linear}.weight"] = layer[f"{linear}.weight"].bfloat16()
        else:
            quantize_(layer, group)
    for name, tensor in layer.items():
        if tensor.dtype == torch.float32 and not name.endswith("weight_scale"):
            layer[name] = tensor.to(checkpoint.dtype)
    return layer


def quantize_(layer: LayerTensors, group: LinearGroup) -> None:
    """Replace the float weights of a group by int8 codes and their scales, in place."""
    for linear in group.linears:
        codes_NK, scale_N = quantize_rows(layer[f"{linear}.weight"])
        layer[f"{linear}.weight"], layer[f"{linear}.weight_scale"] = codes_NK, scale_N[:, None]


def _stored(checkpoint: Checkpoint, index: int) -> LayerTensors:
    prefix, layer = f"model.layers.{index}.", {}
    for name in layer_names(checkpoint.architecture):
        linear = f"{prefix}{name}".removesuffix(".weight")
        if checkpoint.is_int8(linear):
            codes_NK, scale_N = checkpoint.read_codes(linear)
            layer[name], layer[f"{name}_scale"] = codes_NK, scale_N[:, None]
        else:
            layer[name] = checkpoint.read(f"{prefix}{name}")
    return layer
