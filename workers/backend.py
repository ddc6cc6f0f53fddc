"""What the target model asks of a device, and the plain torch form of it.

A backend's results for a token must not depend on which other tokens share the pass: that is what
makes a verified draft equal to plain decoding. `TorchBackend` is the reference, for any dtype torch
computes in; `workers.cpu.CpuBackend` holds the promise bit by bit.

Legend: T tokens of a pass, H query heads, G key/value heads, D head size, K inputs, N outputs,
L positions of a cache row, R rows of the cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from quant.architecture import Architecture
from quant.int8 import MAX_CODE, quantize_rows

Linear = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LinearWeights:
    """One linear: float weights [N, K], or int8 codes [N, K] with a float32 scale [N] a row.

    `max_code` bounds the activation codes of an int8 linear (127: W8A8).
    """

    weight_NK: torch.Tensor
    scale_N: torch.Tensor | None = None
    bias_N: torch.Tensor | None = None
    max_code: int = MAX_CODE


@dataclass(frozen=True)
class KVCache:
    """Keys and values [layers, R, G, L, D] of every row; how much of a row counts is not its affair."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def num_rows(self) -> int:
        """Rows, each with room for `max_len` positions."""
        return self.keys.shape[1]

    @property
    def max_len(self) -> int:
        """Positions a row can hold."""
        return self.keys.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes asked for (untouched pages take none)."""
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True)
class StepBatch:
    """The tokens of one pass, rows ragged and concatenated: no padding anywhere.

    Attributes:
        token_ids: [T] int64.
        rows: [T] int64, the cache row of each token.
        positions: [T] int64; a token sees positions 0..its own of its row, those of this pass
            included. Within a row they must ascend.
        logit_indices: [n] int64, the tokens whose logits are wanted.
    """

    token_ids: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    logit_indices: torch.Tensor


class Backend(Protocol):
    """The device operations of the target model."""

    dtype: torch.dtype
    device: torch.device

    def linear(self, weights: LinearWeights) -> Linear:
        """Prepare a linear; the result maps [T, K] to [T, N]."""
        ...

    def rms_norm(self, x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
        """X / rms(x) * gain over the last dimension of [T, n] or [T, heads, D]."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up for [T, 2 I] holding gate, then up."""
        ...

    def rotate(self, x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Apply rotary embeddings; cos and sin are [T, D / 2]."""
        ...

    def new_cache(self, architecture: Architecture, num_rows: int, max_len: int) -> KVCache:
        """Allocate a cache; pages are touched only as rows grow."""
        ...

    def store(
        self, cache: KVCache, layer: int, k_TGD: torch.Tensor, v_TGD: torch.Tensor, batch: StepBatch
    ) -> None:
        """Write the pass's keys and values to their rows and positions."""
        ...

    def attend(
        self, q_THD: torch.Tensor, cache: KVCache, layer: int, batch: StepBatch, window: int
    ) -> torch.Tensor:
        """Causal attention [T, H, D] of each token over its own row; window 0: no limit."""
        ...


class TorchBackend:
    """The reference: plain torch operations in `dtype` on `device`."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu") -> None:
        self.dtype = dtype
        self.device = torch.device(device)

    def linear(self, weights: LinearWeights) -> Linear:
        """Prepare a linear; int8 products are summed exactly (in float64)."""
        weight_NK = weights.weight_NK.to(self.device)
        bias_N = None if weights.bias_N is None else weights.bias_N.to(self.device, self.dtype)
        if weights.scale_N is None:

            def float_linear(x_TK: torch.Tensor) -> torch.Tensor:
                y_TN = F.linear(x_TK.to(weight_NK.dtype), weight_NK).to(self.dtype)
                return y_TN if bias_N is None else y_TN + bias_N

            return float_linear
        scale_N = weights.scale_N.to(self.device)
        exact_weight_NK = weight_NK.double()

        def int8_linear(x_TK: torch.Tensor) -> torch.Tensor:
            codes_TK, scale_T = quantize_rows(x_TK, weights.max_code)
            sums_TN = F.linear(codes_TK.double(), exact_weight_NK).float()
            y_TN = (sums_TN * scale_N * scale_T[:, None]).to(self.dtype)
            return y_TN if bias_N is None else y_TN + bias_N

        return int8_linear

    def rms_norm(self, x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
        """X / rms(x) * gain over the last dimension."""
        return F.rms_norm(x, gain.shape, gain, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rotate(self, x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate the pairs (i, i + D / 2), as Hugging Face checkpoints lay them out."""
        low, high = x_THD.chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    def new_cache(self, architecture: Architecture, num_rows: int, max_len: int) -> KVCache:
        """Allocate a cache in the compute dtype."""
        return _empty_cache(architecture, num_rows, max_len, self.dtype, self.device)

    def store(
        self, cache: KVCache, layer: int, k_TGD: torch.Tensor, v_TGD: torch.Tensor, batch: StepBatch
    ) -> None:
        """Write the pass's keys and values."""
        cache.keys[layer, batch.rows, :, batch.positions] = k_TGD.to(cache.keys.dtype)
        cache.values[layer, batch.rows, :, batch.positions] = v_TGD.to(cache.values.dtype)

    def attend(
        self, q_THD: torch.Tensor, cache: KVCache, layer: int, batch: StepBatch, window: int
    ) -> torch.Tensor:
        """Attention row by row, over the row's own length."""
        out_THD = torch.empty_like(q_THD)
        repeats = q_THD.shape[1] // cache.keys.shape[2]
        for row in batch.rows.unique().tolist():
            mine = batch.rows == row
            positions_n = batch.positions[mine]
            length = int(positions_n.max()) + 1
            k_HLD = cache.keys[layer, row, :, :length].repeat_interleave(repeats, 0)
            v_HLD = cache.values[layer, row, :, :length].repeat_interleave(repeats, 0)
            keys_at = torch.arange(length, device=self.device)
            mask_nL = keys_at <= positions_n[:, None]
            if window:
                mask_nL &= keys_at > positions_n[:, None] - window
            out_HnD = F.scaled_dot_product_attention(
                q_THD[mine].transpose(0, 1), k_HLD, v_HLD, attn_mask=mask_nL
            )
            out_THD[mine] = out_HnD.transpose(0, 1)
        return out_THD


def _empty_cache(
    architecture: Architecture,
    num_rows: int,
    max_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    shape = (
        architecture.num_layers,
        num_rows,
        architecture.num_kv_heads,
        max_len,
        architecture.head_dim,
    )
    keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    return KVCache(keys, values)
