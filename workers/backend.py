"""What the target model asks of a device, and the plain torch form of it.

A backend's results for a token must not depend on which other tokens share the pass: that is what
makes a verified draft equal to plain decoding. `TorchBackend` is the reference, for any dtype torch
computes in; `workers.cpu.CpuBackend` holds the promise bit by bit.

Legend: T tokens of a pass, H query heads, G key/value heads, D head size, K inputs, N outputs,
J width of a fused projection, L positions of a cache row, R rows of the cache.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F

from quant.architecture import Architecture
from quant.decoder import rms_norm, rotate
from quant.int8 import MAX_CODE, quantize_rows, unpack


@dataclass(frozen=True)
class LinearWeights:
    """One linear: float weights [N, K], or packed int8 codes with a float32 scale [N] an output.

    `max_code` bounds the activation codes of an int8 linear (127: W8A8). See `quant.int8`.
    """

    weight: torch.Tensor
    scale_N: torch.Tensor | None = None
    bias_N: torch.Tensor | None = None
    max_code: int = MAX_CODE


class Linear(Protocol):
    """A linear on its device, together with what comes before and after it in a decoder."""

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """The outputs [T, N]."""
        ...

    def of_norm(self, x_TK: torch.Tensor, gain_K: torch.Tensor, eps: float) -> torch.Tensor:
        """The outputs [T, N] for x / rms(x) * gain."""
        ...

    def add_to_(self, x_TN: torch.Tensor, h_TK: torch.Tensor) -> None:
        """Add the outputs for h to x, in place."""
        ...

    def add_silu_to_(self, x_TN: torch.Tensor, gate_up_TJ: torch.Tensor) -> None:
        """Add the outputs for silu(gate) * up to x, in place; gate_up is [T, 2 K], gate first."""
        ...


@dataclass(frozen=True)
class Heads:
    """How one layer reads its fused projection [T, (H + 2 G) D], and attends.

    Attributes:
        layer: its index, which is where its keys and values lie in the cache.
        window: positions a query sees, its own included; 0: all.
        q_gain: [D], the norm of each query head; None: no norm.
        k_gain: the same for key heads.
        eps: of these norms.
        cos: [L, D / 2], the rotary table; pairs are (i, i + D / 2), as Hugging Face lays them out.
        sin: the same.
    """

    layer: int
    window: int
    q_gain: torch.Tensor | None
    k_gain: torch.Tensor | None
    eps: float
    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def head_dim(self) -> int:
        """D."""
        return 2 * self.cos.shape[1]


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

    def copy_prefix_(self, source: int, target: int, length: int) -> None:
        """Give one row the first `length` positions of another."""
        if source != target:
            for part in (self.keys, self.values):
                part[:, target, :, :length] = part[:, source, :, :length]


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

    def to(self, device: torch.device) -> "StepBatch":
        """The pass on a device."""
        if self.rows.device == device:
            return self
        columns = (self.token_ids, self.rows, self.positions, self.logit_indices)
        return StepBatch(*(column.to(device) for column in columns))

    @cached_property
    def windows(self) -> list[torch.Tensor]:
        """The tokens by row: for each number n of tokens that rows have, [rows, n] indices of tokens."""
        of_row: defaultdict[int, list[int]] = defaultdict(list)
        for token, row in enumerate(self.rows.tolist()):
            of_row[row].append(token)
        of_length: defaultdict[int, list[list[int]]] = defaultdict(list)
        for tokens in of_row.values():
            of_length[len(tokens)].append(tokens)
        return [torch.tensor(group, device=self.rows.device) for group in of_length.values()]


class Attention(Protocol):
    """The attention of one layer on its device."""

    def __call__(self, qkv_TJ: torch.Tensor, cache: KVCache, batch: StepBatch) -> torch.Tensor:
        """Write the pass's keys and values to the cache, then attend causally over each token's row.

        Returns:
            [T, H D].
        """
        ...


class Backend(Protocol):
    """The device operations of the target model."""

    dtype: torch.dtype
    device: torch.device

    def linear(self, weights: LinearWeights) -> Linear:
        """Prepare a linear."""
        ...

    def attention(self, heads: Heads) -> Attention:
        """Prepare a layer's attention."""
        ...

    def new_cache(self, architecture: Architecture, num_rows: int, max_len: int) -> KVCache:
        """Allocate a cache; pages are touched only as rows grow."""
        ...


class TorchBackend:
    """The reference: plain torch operations in `dtype` on `device`."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu") -> None:
        self.dtype = dtype
        self.device = torch.device(device)

    def linear(self, weights: LinearWeights) -> Linear:
        """Prepare a linear; int8 products are summed exactly (in float64)."""
        return TorchLinear(weights, self)

    def attention(self, heads: Heads) -> Attention:
        """Prepare a layer's attention."""
        return _TorchAttention(heads)

    def new_cache(self, architecture: Architecture, num_rows: int, max_len: int) -> KVCache:
        """Allocate a cache in the compute dtype."""
        a = architecture
        shape = (a.num_layers, num_rows, a.num_kv_heads, max_len, a.head_dim)
        keys, values = (torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        return KVCache(keys, values)


class TorchLinear:
    """A linear in plain torch, and what is fused with it."""

    def __init__(self, weights: LinearWeights, backend: TorchBackend) -> None:
        self._dtype, self._max_code = backend.dtype, weights.max_code
        self._scale_N = None if weights.scale_N is None else weights.scale_N.to(backend.device)
        self._bias_N = None
        if weights.bias_N is not None:
            self._bias_N = weights.bias_N.to(backend.device, backend.dtype)
        self._weight_NK = weights.weight.to(backend.device)
        if self._scale_N is not None:
            num_outputs, num_inputs = len(self._scale_N), weights.weight[0, :, 0].numel()
            self._weight_NK = unpack(self._weight_NK, num_outputs, num_inputs).double()

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        if self._scale_N is None:
            y_TN = F.linear(x_TK.to(self._weight_NK.dtype), self._weight_NK).to(self._dtype)
        else:
            codes_TK, scale_T = quantize_rows(x_TK, self._max_code)
            weight_NK = self._weight_NK[:, : x_TK.shape[1]]  # Without what packing added.
            sums_TN = F.linear(codes_TK.double(), weight_NK).float()
            y_TN = (sums_TN * self._scale_N * scale_T[:, None]).to(self._dtype)
        return y_TN if self._bias_N is None else y_TN + self._bias_N

    def of_norm(self, x_TK: torch.Tensor, gain_K: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Linear`."""
        return self(rms_norm(x_TK, gain_K, eps))

    def add_to_(self, x_TN: torch.Tensor, h_TK: torch.Tensor) -> None:
        """See `Linear`."""
        x_TN += self(h_TK)

    def add_silu_to_(self, x_TN: torch.Tensor, gate_up_TJ: torch.Tensor) -> None:
        """See `Linear`."""
        gate_TK, up_TK = gate_up_TJ.chunk(2, dim=-1)
        x_TN += self(F.silu(gate_TK) * up_TK)


class _TorchAttention:
    def __init__(self, heads: Heads) -> None:
        self._heads = heads

    def __call__(self, qkv_TJ: torch.Tensor, cache: KVCache, batch: StepBatch) -> torch.Tensor:
        heads, num_kv_heads = self._heads, cache.keys.shape[2]
        all_THD = qkv_TJ.unflatten(1, (-1, heads.head_dim))
        num_heads = all_THD.shape[1] - 2 * num_kv_heads
        q_THD, k_TGD, v_TGD = all_THD.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        if heads.q_gain is not None:
            q_THD = rms_norm(q_THD, heads.q_gain, heads.eps)
        if heads.k_gain is not None:
            k_TGD = rms_norm(k_TGD, heads.k_gain, heads.eps)
        cos, sin = heads.cos[batch.positions], heads.sin[batch.positions]
        q_THD, k_TGD = rotate(q_THD, cos, sin), rotate(k_TGD, cos, sin)
        keys_RGLD, values_RGLD = cache.keys[heads.layer], cache.values[heads.layer]
        keys_RGLD[batch.rows, :, batch.positions] = k_TGD.to(keys_RGLD.dtype)
        values_RGLD[batch.rows, :, batch.positions] = v_TGD.to(values_RGLD.dtype)
        out_THD = torch.empty_like(q_THD)
        for row in batch.rows.unique().tolist():
            mine = batch.rows == row
            out_THD[mine] = _attend_row(
                q_THD[mine], batch.positions[mine], keys_RGLD[row], values_RGLD[row], heads.window
            )
        return out_THD.flatten(1)


def _attend_row(
    q_nHD: torch.Tensor,
    positions_n: torch.Tensor,
    keys_GLD: torch.Tensor,
    values_GLD: torch.Tensor,
    window: int,
) -> torch.Tensor:
    """Queries of one row over the row's own length."""
    length = int(positions_n.max()) + 1
    repeats = q_nHD.shape[1] // keys_GLD.shape[0]
    k_HLD, v_HLD = (
        part[:, :length].to(q_nHD.dtype).repeat_interleave(repeats, 0)
        for part in (keys_GLD, values_GLD)
    )
    keys_at = torch.arange(length, device=q_nHD.device)
    mask_nL = keys_at <= positions_n[:, None]
    if window:
        mask_nL &= keys_at > positions_n[:, None] - window
    q_HnD = q_nHD.transpose(0, 1)
    return F.scaled_dot_product_attention(q_HnD, k_HLD, v_HLD, attn_mask=mask_nL).transpose(0, 1)
