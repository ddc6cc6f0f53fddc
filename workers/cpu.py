"""The CPU backend: float32 activations, int8 or bfloat16 weights, a bfloat16 cache.

numba kernels over torch's memory, on as many threads as numba is set to. Every result is a function
of its own row alone, bit by bit (see `workers.tiles` and `workers.kernels`). Everything a kernel is
given is contiguous: numba compiles each memory layout on its own, and two layouts need not round
alike, so a view that is contiguous for one token and not for two would depend on its company.
"""

import logging
import math
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import cache

import numpy as np
import torch

from quant.architecture import Architecture
from quant.int8 import MAX_CODE, MAX_WIDE_CODE, PACK_N, pack
from workers import attention, kernels, matmul, tiles, vnni
from workers.attention import KEYS
from workers.backend import Attention, Heads, KVCache, Linear, LinearWeights, StepBatch
from workers.torch_backend import TorchBackend

_LOGGER = logging.getLogger(__name__)
_NO_GAIN = np.empty(0, np.float32)


class CpuBackend(TorchBackend):
    """See the module's text."""

    def __init__(self) -> None:
        super().__init__(torch.float32)

    def linear(self, weights: LinearWeights) -> Linear:
        """Prepare an int8 or bfloat16 linear over the weights where they lie."""
        return _Bf16Linear(weights) if weights.scale_N is None else _Int8Linear(weights)

    def attention(self, heads: Heads) -> Attention:
        """Prepare a layer's attention."""
        return _CpuAttention(heads)

    def new_cache(self, architecture: Architecture, num_rows: int, max_len: int) -> KVCache:
        """Allocate a bfloat16 cache, heads and rows padded to whole tiles."""
        padded = replace(architecture, head_dim=_padded(architecture.head_dim, tiles.MIX_LANES))
        rows = TorchBackend(torch.bfloat16).new_cache(padded, num_rows, _padded(max_len, KEYS))
        *outer, max_len, head_dim = rows.keys.shape
        return CellCache(rows.keys.view(*outer, max_len // KEYS, head_dim, KEYS), rows.values)


class CellCache(KVCache):
    """Keys lie in cells of KEYS positions side by side: [layers, R, G, C, D, KEYS]."""

    def copy_prefix_(self, source: int, target: int, length: int) -> None:
        """Give one row the first `length` positions of another; more of its keys may change."""
        if source != target:
            num_cells = -(-length // KEYS)
            self.keys[:, target, :, :num_cells] = self.keys[:, source, :, :num_cells]
            self.values[:, target, :, :length] = self.values[:, source, :, :length]

    @property
    def keys_by_position(self) -> torch.Tensor:
        """A copy of the keys as [layers, R, G, L, D]."""
        return self.keys.swapaxes(4, 5).flatten(3, 4)


class _CpuAttention:
    def __init__(self, heads: Heads) -> None:
        self._layer, self._window, self._head_dim = heads.layer, heads.window, heads.head_dim
        self._factor = np.float32(1 / math.sqrt(heads.head_dim))
        self._q_gain = _NO_GAIN if heads.q_gain is None else _array(heads.q_gain)
        self._k_gain = _NO_GAIN if heads.k_gain is None else _array(heads.k_gain)
        self._eps, self._cos, self._sin = heads.eps, _array(heads.cos), _array(heads.sin)

    def __call__(self, qkv_TJ: torch.Tensor, cache: KVCache, batch: StepBatch) -> torch.Tensor:
        qkv, keys, values = _array(qkv_TJ), _bits(cache.keys), _bits(cache.values)
        rows, positions = _array(batch.rows), _array(batch.positions)
        num_kv_heads, padded_dim = values.shape[2], values.shape[4]
        num_heads = qkv.shape[1] // self._head_dim - 2 * num_kv_heads
        q_THP = np.empty((len(qkv), num_heads, padded_dim), np.float32)
        attention.prepare_heads(
            qkv,
            self._q_gain,
            self._k_gain,
            self._eps,
            self._cos,
            self._sin,
            rows,
            positions,
            self._layer,
            keys,
            values,
            q_THP,
        )
        out_THP = np.empty_like(q_THP)
        attention.attend(
            q_THP, rows, positions, self._layer, keys, values, self._window, self._factor, out_THP
        )
        out_TJ = out_THP[:, :, : self._head_dim].reshape(len(qkv), num_heads * self._head_dim)
        return torch.from_numpy(out_TJ)


class _CpuLinear(ABC):
    num_outputs: int

    @abstractmethod
    def _run(self, x_TK: np.ndarray, out_TN: np.ndarray, *, add: bool) -> None:
        """Set out to the outputs for x, or add them to it."""

    def _outputs(self, x_TK: np.ndarray) -> torch.Tensor:
        out_TN = np.empty((len(x_TK), self.num_outputs), np.float32)
        self._run(x_TK, out_TN, add=False)
        return torch.from_numpy(out_TN)

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self._outputs(_array(x_TK))

    def of_norm(self, x_TK: torch.Tensor, gain_K: torch.Tensor, eps: float) -> torch.Tensor:
        x = _array(x_TK)
        normed_TK = np.empty_like(x)
        kernels.rms_norm(x, _array(gain_K), eps, normed_TK)
        return self._outputs(normed_TK)

    def add_to_(self, x_TN: torch.Tensor, h_TK: torch.Tensor) -> None:
        self._run(_array(h_TK), x_TN.numpy(), add=True)

    def add_silu_to_(self, x_TN: torch.Tensor, gate_up_TJ: torch.Tensor) -> None:
        gate_up = _array(gate_up_TJ)
        h_TK = np.empty((len(gate_up), gate_up.shape[1] // 2), np.float32)
        kernels.silu_mul(gate_up, h_TK)
        self._run(h_TK, x_TN.numpy(), add=True)


class _Int8Linear(_CpuLinear):
    def __init__(self, weights: LinearWeights) -> None:
        assert weights.scale_N is not None
        self.num_outputs = len(weights.scale_N)
        self._weight = weights.weight.contiguous()  # Kept alive for its address.
        self._address = self._weight.data_ptr()
        self._scale = _padded_vector(weights.scale_N, self.num_outputs)
        self._bias = _padded_vector(weights.bias_N, self.num_outputs)
        assert weights.max_code <= MAX_WIDE_CODE
        self._max_code = weights.max_code
        self._kernel = matmul.linear_vnni if uses_vnni(weights) else matmul.linear_int8

    def _run(self, x_TK: np.ndarray, out_TN: np.ndarray, *, add: bool) -> None:
        self._quantize_and_multiply(x_TK, out_TN, gated=False, add=add)

    def add_silu_to_(self, x_TN: torch.Tensor, gate_up_TJ: torch.Tensor) -> None:
        self._quantize_and_multiply(_array(gate_up_TJ), x_TN.numpy(), gated=True, add=True)

    def _quantize_and_multiply(
        self, x: np.ndarray, out_TN: np.ndarray, *, gated: bool, add: bool
    ) -> None:
        weights = self._address, self._scale, self._bias
        self._kernel(x, gated, self._max_code, *weights, add, out_TN)


def uses_vnni(weights: LinearWeights) -> bool:
    """Whether a linear's products are done by AVX512-VNNI's instructions."""
    return weights.scale_N is not None and _vnni_is_exact()


@cache
def _vnni_is_exact() -> bool:
    """Whether this CPU has these instructions, and they give the sums they should."""
    if not vnni.HAS_VNNI:
        return False
    weight = torch.full((PACK_N, 64), -128, dtype=torch.int8)
    weight[::2] = MAX_CODE
    packed, ones = pack(weight), np.ones(PACK_N, np.float32)
    codes, got = np.full((3, 1, 64), MAX_CODE, np.int8), np.empty((3, PACK_N), np.float32)
    codes[1] = -MAX_CODE
    matmul.matmul_vnni(codes, ones[:3], packed.data_ptr(), ones, 0 * ones, False, got)
    expected = codes[:, 0].astype(np.float32) @ weight.numpy().T.astype(np.float32)
    exact = np.array_equal(got, expected)
    if not exact:
        _LOGGER.warning("AVX512-VNNI gives wrong sums here and is not used")
    return exact


class _Bf16Linear(_CpuLinear):
    def __init__(self, weights: LinearWeights) -> None:
        self.num_outputs, num_inputs = weights.weight.shape
        missing = _padded(num_inputs, tiles.TILE_K) - num_inputs
        self._weight_NK = weights.weight.contiguous()
        if missing:
            self._weight_NK = torch.nn.functional.pad(self._weight_NK, (0, missing))
        self._bias = _padded_vector(weights.bias_N, self.num_outputs)

    def _run(self, x_TK: np.ndarray, out_TN: np.ndarray, *, add: bool) -> None:
        matmul.linear_bf16(x_TK, _bits(self._weight_NK), self._bias, add, out_TN)


def _array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor as numpy sees it, always contiguous."""
    return tensor.contiguous().numpy()


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """A bfloat16 tensor's memory as numpy sees it."""
    return tensor.view(torch.uint16).numpy()


def _padded(size: int, step: int) -> int:
    """The size rounded up to a whole number of steps."""
    return -(-size // step) * step


def _padded_vector(vector: torch.Tensor | None, size: int) -> np.ndarray:
    """A float32 copy [size, rounded up to PACK_N] with zeros behind, and where there is none."""
    padded = np.zeros(_padded(size, PACK_N), np.float32)
    if vector is not None:
        padded[:size] = vector.float().numpy()
    return padded
