"""The CPU backend: float32 activations, int8 or bfloat16 weights, a bfloat16 cache.

Every result is a function of its own row alone, bit by bit (see `workers.tiles` and
`workers.kernels`).
"""

import math

import numpy as np
import torch

from quant.architecture import Architecture
from workers import kernels, tiles
from workers.backend import KVCache, Linear, LinearWeights, StepBatch, TorchBackend


class CpuBackend(TorchBackend):
    """numba kernels over torch's memory."""

    def __init__(self) -> None:
        super().__init__(torch.float32)

    def linear(self, weights: LinearWeights) -> Linear:
        """Prepare an int8 or bfloat16 linear over the weights where they lie."""
        weight_NK = _pad_inputs(weights.weight_NK)
        bias_N = np.empty(0, np.float32) if weights.bias_N is None else weights.bias_N.numpy()
        num_outputs, padded_inputs = weight_NK.shape
        if weights.scale_N is None:
            bits_NK = weight_NK.view(torch.uint16).numpy()

            def bf16_linear(x_TK: torch.Tensor) -> torch.Tensor:
                x = _array(_pad_inputs(x_TK.bfloat16().float()))
                out_TN = torch.empty(len(x_TK), num_outputs)
                tiles.matmul_bf16(x, bits_NK, bias_N, out_TN.numpy())
                return out_TN

            return bf16_linear
        codes_NK, scale_N = weight_NK.numpy(), weights.scale_N.numpy()

        def int8_linear(x_TK: torch.Tensor) -> torch.Tensor:
            codes_TK = np.empty((len(x_TK), padded_inputs), np.int16)
            scale_T = np.empty(len(x_TK), np.float32)
            kernels.quantize_rows(_array(x_TK), weights.max_code, codes_TK, scale_T)
            out_TN = torch.empty(len(x_TK), num_outputs)
            tiles.matmul_int8(codes_TK, scale_T, codes_NK, scale_N, bias_N, out_TN.numpy())
            return out_TN

        return int8_linear

    def rms_norm(self, x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
        """X / rms(x) * gain over the last dimension."""
        out = torch.empty(x.shape)
        heads = (len(x), -1, x.shape[-1])
        kernels.rms_norm(_array(x.reshape(heads)), gain.numpy(), eps, out.view(heads).numpy())
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up."""
        out = torch.empty(len(gate_up), gate_up.shape[1] // 2)
        kernels.silu_mul(_array(gate_up), out.numpy())
        return out

    def rotate(self, x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Apply rotary embeddings."""
        out_THD = torch.empty(x_THD.shape)
        kernels.rotate(_array(x_THD), _array(cos), _array(sin), out_THD.numpy())
        return out_THD

    def new_cache(self, architecture: Architecture, num_rows: int, max_len: int) -> KVCache:
        """Allocate a bfloat16 cache."""
        return TorchBackend(torch.bfloat16).new_cache(architecture, num_rows, max_len)

    def store(
        self, cache: KVCache, layer: int, k_TGD: torch.Tensor, v_TGD: torch.Tensor, batch: StepBatch
    ) -> None:
        """Write the pass's keys and values, rounded to bfloat16."""
        keys, values = _bits(cache.keys[layer]), _bits(cache.values[layer])
        rows, positions = _array(batch.rows), _array(batch.positions)
        kernels.store(keys, values, _array(k_TGD), _array(v_TGD), rows, positions)

    def attend(
        self, q_THD: torch.Tensor, cache: KVCache, layer: int, batch: StepBatch, window: int
    ) -> torch.Tensor:
        """Causal attention of each token over its own row's length."""
        out_THD = torch.empty(q_THD.shape)
        stride = _coprime_stride(len(q_THD) * cache.keys.shape[2])
        kernels.attend(
            _array(q_THD),
            _bits(cache.keys[layer]),
            _bits(cache.values[layer]),
            _array(batch.rows),
            _array(batch.positions),
            window,
            stride,
            out_THD.numpy(),
        )
        return out_THD


def _array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor as numpy sees it, always contiguous.

    numba compiles each memory layout on its own, and two layouts need not round alike: a view that is
    contiguous for one token and not for two would make a token's result depend on its company.
    """
    return tensor.contiguous().numpy()


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """A bfloat16 tensor's memory as numpy sees it."""
    return tensor.view(torch.uint16).numpy()


def _pad_inputs(x_MK: torch.Tensor) -> torch.Tensor:
    """Zeros up to a whole number of tile steps; the tensor itself where none are missing."""
    missing = -x_MK.shape[1] % tiles.TILE_K
    return torch.nn.functional.pad(x_MK, (0, missing)) if missing else x_MK


def _coprime_stride(count: int) -> int:
    """A step near the golden section of `count` that visits every item once."""
    stride = max(1, int(count * 0.618))
    while math.gcd(stride, count) != 1:
        stride += 1
    return stride
