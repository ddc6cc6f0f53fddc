"""One checkpoint to the tensors the target model runs on: fused, quantized, in numpy buffers.

A piece is a dict of arrays: piece 0 holds embeddings, head and final norm, piece i + 1 layer i. The
projections that share an input are fused (q/k/v, gate/up), and the int8 weights of linears are packed
(`quant.int8.pack`). numpy has no bfloat16, so a bfloat16 tensor travels as uint16; nothing else does.
"""

import hashlib
import json
import warnings
from collections.abc import Iterator

import numpy as np
import torch

from quant.checkpoint import EMBEDDINGS, FINAL_NORM, HEAD, Checkpoint, linear_groups
from quant.config import Precision, QuantConfig
from quant.errors import CheckpointError
from quant.int8 import pack, quantize_rows

Piece = dict[str, np.ndarray]

# Part of the digest: raise it whenever the tensors made from the same checkpoint change.
CODE_VERSION = 2

_FLOAT_DTYPES: dict[Precision, torch.dtype] = {
    "w8a8": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_FUSED_NAMES = ("qkv", "o", "gate_up", "down")


def weights_digest(checkpoint: Checkpoint, config: QuantConfig) -> str:
    """Name the converted weights by their content: source, recipe and code version (hex)."""
    recipe = json.dumps([checkpoint.digest(), config.model_dump(), CODE_VERSION], sort_keys=True)
    return hashlib.sha256(recipe.encode()).hexdigest()


def num_pieces(checkpoint: Checkpoint) -> int:
    """How many pieces `convert` yields, known before anything is read."""
    return checkpoint.architecture.num_layers + 1


def convert(checkpoint: Checkpoint, config: QuantConfig) -> Iterator[Piece]:
    """Yield the pieces in order; the same input always gives the same bytes."""
    yield _convert_outer(checkpoint, config)
    for index in range(checkpoint.architecture.num_layers):
        yield _convert_layer(checkpoint, config, index)


def to_torch(array: np.ndarray) -> torch.Tensor:
    """A tensor over the same memory, bfloat16 restored. The memory may be read-only: never write."""
    with warnings.catch_warnings():
        # Arrays from the object store are read-only views, which torch cannot express.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def _convert_outer(checkpoint: Checkpoint, config: QuantConfig) -> Piece:
    quantized = config.precision == "w8a8"
    piece: Piece = {}
    embeddings = _read(checkpoint, EMBEDDINGS)
    if quantized and config.embeddings == "int8":  # Looked up row by row, hence not packed.
        codes, scale = quantize_rows(embeddings)
        piece["embeddings.weight"], piece["embeddings.scale"] = codes.numpy(), scale.numpy()
    else:
        piece["embeddings.weight"] = _weight_array(embeddings, config)
    head_int8 = quantized and config.head == "int8"
    head = embeddings if checkpoint.architecture.tied_head else _read(checkpoint, HEAD)
    if head is not embeddings or "embeddings.scale" in piece or head_int8:
        _put(piece, "head", head, config, int8=head_int8)
    piece["final_norm"] = _float_array(_read(checkpoint, FINAL_NORM), config)
    return piece


def _convert_layer(checkpoint: Checkpoint, config: QuantConfig, index: int) -> Piece:
    layer = f"model.layers.{index}"
    architecture = checkpoint.architecture
    piece: Piece = {}
    norms = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
    if architecture.qk_norm:
        norms |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    for ours, theirs in norms.items():
        piece[ours] = _float_array(_read(checkpoint, f"{layer}.{theirs}.weight"), config)
    for fused, (module, parts, bias) in zip(_FUSED_NAMES, linear_groups(architecture), strict=True):
        names = [f"{layer}.{module}.{part}" for part in parts]
        weight = torch.cat([_read(checkpoint, f"{name}.weight") for name in names])
        _put(piece, fused, weight, config, int8=config.precision == "w8a8")
        if bias:
            biases = torch.cat([_read(checkpoint, f"{name}.bias") for name in names])
            piece[f"{fused}.bias"] = _float_array(biases, config)
    return piece


def _read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    tensor = checkpoint.read(name)
    if not tensor.is_floating_point():
        raise CheckpointError(f"{checkpoint.folder}: {name} has dtype {tensor.dtype}, not a float")
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"{checkpoint.folder}: {name} holds NaN or infinity")
    return tensor


def _put(piece: Piece, name: str, weight: torch.Tensor, config: QuantConfig, *, int8: bool) -> None:
    if int8:
        codes, scale = quantize_rows(weight)
        piece[f"{name}.weight"], piece[f"{name}.scale"] = pack(codes).numpy(), scale.numpy()
    else:
        piece[f"{name}.weight"] = _weight_array(weight, config)


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
