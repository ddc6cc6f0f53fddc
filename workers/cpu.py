"""The CPU backend: float32 activations, int8 or bfloat16 weights, a bfloat16 cache.

Every result is a function of its own row alone, bit by bit (see `workers.tiles` and
`workers.kernels`).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numba import get_num_threads, set_num_threads

from quant.architecture import Architecture
from workers import kernels, tiles
from workers.backend import KVCache, Linear, LinearWeights, StepBatch, TorchBackend

# Elementary operations below which starting and joining threads costs more than it saves.
_WORTH_A_THREAD = 100_000


class CpuBackend(TorchBackend):
    """numba kernels over torch's memory, on as many threads as numba is set to when it is built."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self._num_threads = get_num_threads()

    def _run(self, num_operations: int, kernel: Callable[..., None], *arguments: Any) -> None:
        """Call a kernel, on one thread where it is done before a second one would have started."""
        if num_operations > _WORTH_A_THREAD:
            kernel(*arguments)
            return
        set_num_threads(1)
        kernel(*arguments)
        set_num_threads(self._num_threads)

    def linear(self, weights: LinearWeights) -> Linear:
        """Prepare an int8 or bfloat16 linear over the weights where they lie."""
        weight_NK = _pad_inputs(weights.weight_NK)
        bias_N = np.empty(0, np.float32) if weights.bias_N is None else weights.bias_N.numpy()
        num_outputs, padded_inputs = weight_NK.shape
        if weights.scale_N is None:
            bits_NK = weight_NK.view(torch.uint16).numpy()

            def bf16_linear(x_TK: torch.Tensor) -> torch.Tensor:
                x = _array(_pad_inputs(x_TK.bfloat16().float()))
                out_TN = torch.empty(x_TK.shape[0], num_outputs)
                self._run(
                    num_outputs * x.size // 8, tiles.matmul_bf16, x, bits_NK, bias_N, out_TN.numpy()
                )
                return out_TN

            return bf16_linear
        codes_NK, scale_N = weight_NK.numpy(), weights.scale_N.numpy()

        def int8_linear(x_TK: torch.Tensor) -> torch.Tensor:
            codes_TK = np.empty((x_TK.shape[0], padded_inputs), np.int16)
            scale_T = np.empty(x_TK.shape[0], np.float32)
            self._run(
                x_TK.numel(),
                kernels.quantize_rows,
                _array(x_TK),
                weights.max_code,
                codes_TK,
                scale_T,
            )
            out_TN = torch.empty(x_TK.shape[0], num_outputs)
            self._run(
                num_outputs * codes_TK.size // 16,
                tiles.matmul_int8,
                codes_TK,
                scale_T,
                codes_NK,
                scale_N,
                bias_N,
                out_TN.numpy(),
            )
            return out_TN

        return int8_linear

    def rms_norm(self, x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
        """X / rms(x) * gain over the last dimension."""
        out = torch.empty(x.shape)
        heads = (x.shape[0], x.shape[1] if x.dim() == 3 else 1, x.shape[-1])
        self._run(
            x.numel(),
            kernels.rms_norm,
            _array(x.reshape(heads)),
            gain.numpy(),
            eps,
            out.view(heads).numpy(),
        )
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up."""
        out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._run(4 * out.numel(), kernels.silu_mul, _array(gate_up), out.numpy())
        return out

    def rotate(self, x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Apply rotary embeddings."""
        out_THD = torch.empty(x_THD.shape)
        self._run(
            x_THD.numel(), kernels.rotate, _array(x_THD), _array(cos), _array(sin), out_THD.numpy()
        )
        return out_THD

    def new_cache(self, architecture: Architecture, num_rows: int, max_len: int) -> KVCache:
        """Allocate a bfloat16 cache, heads padded to a whole number of tile steps."""
        head_dim = architecture.head_dim + _missing(architecture.head_dim)
        padded = replace(architecture, head_dim=head_dim)
        return TorchBackend(torch.bfloat16).new_cache(padded, num_rows, max_len)

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
        head_dim = q_THD.shape[2]
        q_THD = _pad_inputs(q_THD)
        out_THD = torch.empty(q_THD.shape)
        work = int(batch.positions.sum()) * q_THD.shape[1] * q_THD.shape[2] // 4
        stride = _coprime_stride(q_THD.shape[0] * cache.keys.shape[2])
        self._run(
            work,
            kernels.attend,
            _array(q_THD),
            _bits(cache.keys[layer]),
            _bits(cache.values[layer]),
            _array(batch.rows),
            _array(batch.positions),
            window,
            np.float32(1 / math.sqrt(head_dim)),
            stride,
            out_THD.numpy(),
        )
        return out_THD[:, :, :head_dim]


def _array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor as numpy sees it, always contiguous.

    numba compiles each memory layout on its own, and two layouts need not round alike: a view that is
    contiguous for one token and not for two would make a token's result depend on its company.
    """
    return tensor.contiguous().numpy()


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """A bfloat16 tensor's memory as numpy sees it."""
    return tensor.view(torch.uint16).numpy()


def _missing(size: int) -> int:
    """How many zeros a dimension lacks to a whole number of tile steps."""
    return -size % tiles.TILE_K


def _pad_inputs(x: torch.Tensor) -> torch.Tensor:
    """Zeros up to a whole number of tile steps; the tensor itself where none are missing."""
    missing = _missing(x.shape[-1])
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _coprime_stride(count: int) -> int:
    """A step near the golden section of `count` that visits every item once."""
    stride = max(1, int(count * 0.618))
    while math.gcd(stride, count) != 1:
        stride += 1
    return stride
