"""One checkpoint to the tensors the target model runs on: fused, quantized, in numpy buffers.

A piece is a dict of arrays: piece 0 holds embeddings, head and final norm, piece i + 1 layer i. The
projections that share an input are fused (q/k/v, gate/up), and the int8 weights of linears are packed
(`quant.int8.pack`), with `X.max_code` beside them where activations have more bits. numpy has no
bfloat16, so a bfloat16 tensor travels as uint16; nothing else does.
"""

import math
import warnings
from collections.abc import Iterator

import numpy as np
import torch

from quant.architecture import Architecture
from quant.checkpoint import (
    EMBEDDINGS,
    FINAL_NORM,
    HEAD,
    Checkpoint,
    linear_groups,
    tensor_shapes,
)
from quant.config import Precision, QuantConfig
from quant.decoder import LayerTensors, fused_bias, fused_scale, fused_weight
from quant.errors import CheckpointError
from quant.int8 import MAX_CODE, activation_code, dequantize_rows, pack, quantize_rows
from quant.quantize import ROUND_TO_NEAREST, layer_tensors

Piece = dict[str, np.ndarray]

_FLOAT_DTYPES: dict[Precision, torch.dtype] = {
    "w8a8": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def num_pieces(checkpoint: Checkpoint) -> int:
    """How many pieces `convert` yields, known before anything is read."""
    return checkpoint.architecture.num_layers + 1


def num_bytes(architecture: Architecture, config: QuantConfig) -> int:
    """About how many bytes the pieces take together, known before anything is read."""
    shapes = tensor_shapes(architecture)
    wide = _FLOAT_DTYPES[config.precision].itemsize
    w8a8 = config.precision == "w8a8"
    of_outer = {EMBEDDINGS: config.embeddings, HEAD: config.head}
    total = (config.max_float_bytes or 0) if w8a8 else 0
    for name, shape in shapes.items():
        is_int8 = w8a8 and len(shape) == 2 and of_outer.get(name, "int8") == "int8"
        total += math.prod(shape) * (1 if is_int8 else wide)
    if architecture.tied_head and w8a8 and "int8" in of_outer.values():
        total += math.prod(shapes[EMBEDDINGS]) * (1 if config.head == "int8" else wide)
    return total


def convert(checkpoint: Checkpoint, config: QuantConfig) -> Iterator[Piece]:
    """Yield the pieces in order; the same input always gives the same bytes.

    Of a floating-point checkpoint w8a8 makes weights rounded to nearest; see `quant.prepare` for more.

    Raises:
        CheckpointError: a tensor is unusable, or a quantized checkpoint is to run in floating point.
    """
    check_precision(checkpoint, config)
    yield _outer_piece(checkpoint, config)
    for index in range(checkpoint.architecture.num_layers):
        layer = layer_tensors(checkpoint, config, ROUND_TO_NEAREST, index)
        yield _layer_piece(layer, checkpoint.architecture, config)


def check_precision(checkpoint: Checkpoint, config: QuantConfig) -> None:
    """Raise CheckpointError if a quantized checkpoint is to run in floating point."""
    if checkpoint.is_quantized and config.precision != "w8a8":
        raise CheckpointError(
            f"{checkpoint.folder}: holds int8 weights and cannot run in {config.precision}; give the "
            "original checkpoint"
        )


def to_torch(array: np.ndarray) -> torch.Tensor:
    """A tensor over the same memory, bfloat16 restored. The memory may be read-only: never write."""
    with warnings.catch_warnings():
        # Arrays from the object store are read-only views, which torch cannot express.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def _outer_piece(checkpoint: Checkpoint, config: QuantConfig) -> Piece:
    quantized = config.precision == "w8a8"
    piece: Piece = {}
    embeddings = checkpoint.read(EMBEDDINGS)
    if quantized and config.embeddings == "int8":  # Looked up row by row, hence not packed.
        codes, scale = quantize_rows(embeddings)
        piece["embeddings.weight"], piece["embeddings.scale"] = codes.numpy(), scale.numpy()
    else:
        piece["embeddings.weight"] = _weight_array(embeddings, config)
    head_int8 = quantized and config.head == "int8"
    if not checkpoint.architecture.tied_head:
        _put_head(piece, checkpoint, config, int8=head_int8)
    elif head_int8:
        _put_int8(piece, "head", *quantize_rows(embeddings), config)
    elif "embeddings.scale" in piece:
        piece["head.weight"] = _weight_array(embeddings, config)
    piece["final_norm"] = _float_array(checkpoint.read(FINAL_NORM), config)
    return piece


def _put_head(piece: Piece, checkpoint: Checkpoint, config: QuantConfig, *, int8: bool) -> None:
    """A head of its own; other tools quantize it, too."""
    linear = HEAD.removesuffix(".weight")
    if checkpoint.is_int8(linear):
        codes, scale = checkpoint.read_codes(linear)
    elif int8:
        codes, scale = quantize_rows(checkpoint.read(HEAD))
    else:
        piece["head.weight"] = _weight_array(checkpoint.read(HEAD), config)
        return
    if int8:
        _put_int8(piece, "head", codes, scale, config)
    else:
        piece["head.weight"] = _weight_array(dequantize_rows(codes, scale), config)


def _layer_piece(layer: LayerTensors, architecture: Architecture, config: QuantConfig) -> Piece:
    piece: Piece = {}
    norms = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
    if architecture.qk_norm:
        norms |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    for ours, theirs in norms.items():
        piece[ours] = _float_array(layer[f"{theirs}.weight"], config)
    for group in linear_groups(architecture):
        weight, bias = fused_weight(layer, group), fused_bias(layer, group)
        if weight.dtype == torch.int8:
            _put_int8(piece, group.name, weight, fused_scale(layer, group), config)
        else:
            piece[f"{group.name}.weight"] = _weight_array(weight, config)
        if bias is not None:
            piece[f"{group.name}.bias"] = _float_array(bias, config)
    return piece


def _put_int8(
    piece: Piece, name: str, codes: torch.Tensor, scale: torch.Tensor, config: QuantConfig
) -> None:
    piece[f"{name}.weight"], piece[f"{name}.scale"] = pack(codes).numpy(), scale.numpy()
    max_code = activation_code(config, name, codes.shape[1])
    if max_code != MAX_CODE:
        piece[f"{name}.max_code"] = np.array([max_code], dtype=np.int32)


def _weight_array(weight: torch.Tensor, config: QuantConfig) -> np.ndarray:
    return _to_numpy(weight.to(_FLOAT_DTYPES[config.precision]))


def _float_array(vector: torch.Tensor, config: QuantConfig) -> np.ndarray:
    """Norm gains and biases: float32, or float64 in the float64 reference."""
    wide = torch.float64 if config.precision == "float64" else torch.float32
    return _to_numpy(vector.to(wide))


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.uint16).numpy()
    return tensor.contiguous().numpy()
