"""The reference backend: plain torch operations, for any dtype torch computes in.

Legend: T tokens of a pass, n queries of a row, H query heads, G key/value heads, D head size, K inputs,
N outputs, J width of a fused projection, L positions of a cache row, R rows of the cache.
"""

import torch
import torch.nn.functional as F

from quant.architecture import Architecture
from quant.decoder import rms_norm, rotate
from quant.int8 import quantize_rows, unpack
from workers.backend import Attention, Forward, Heads, KVCache, Linear, LinearWeights, StepBatch


class TorchBackend:
    """The reference: plain torch operations in `dtype` on `device`."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu") -> None:
        self.dtype = dtype
        self.device = torch.empty(0, device=device).device  # With its number.

    def linear(self, weights: LinearWeights) -> Linear:
        """Prepare a linear; int8 products are summed exactly (in float64)."""
        return TorchLinear(weights, self)

    def attention(self, heads: Heads) -> Attention:
        """Prepare a layer's attention."""
        return TorchAttention(heads)

    def new_cache(self, architecture: Architecture, num_rows: int, max_len: int) -> KVCache:
        """Allocate a cache in the compute dtype."""
        a = architecture
        shape = (a.num_layers, num_rows, a.num_kv_heads, max_len, a.head_dim)
        keys, values = (torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        return KVCache(keys, values)

    def launcher(self, forward: Forward) -> Forward:
        """The pass as it is, on the device."""
        return lambda batch, cache: forward(batch.to(self.device), cache)


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
            self._weight_NK = self._unpacked(self._weight_NK, len(self._scale_N))

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        if self._scale_N is None:
            y_TN = F.linear(x_TK.to(self._weight_NK.dtype), self._weight_NK).to(self._dtype)
        else:
            codes_TK, scale_T = quantize_rows(x_TK, self._max_code)
            sums_TN = self._sums(codes_TK).float()
            y_TN = (sums_TN * self._scale_N * scale_T[:, None]).to(self._dtype)
        return y_TN if self._bias_N is None else y_TN + self._bias_N

    def _unpacked(self, packed: torch.Tensor, num_outputs: int) -> torch.Tensor:
        """Packed int8 weights as `_sums` wants them."""
        return unpack(packed, num_outputs, packed[0, :, 0].numel()).double()

    def _sums(self, codes_TK: torch.Tensor) -> torch.Tensor:
        """Exact sums [T, N] of activation codes times weights."""
        weight_NK = self._weight_NK[:, : codes_TK.shape[1]]  # Without what packing added.
        return F.linear(codes_TK.double(), weight_NK)

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


class TorchAttention:
    """Attention in plain torch, row by row."""

    def __init__(self, heads: Heads) -> None:
        self._heads = heads

    def __call__(self, qkv_TJ: torch.Tensor, cache: KVCache, batch: StepBatch) -> torch.Tensor:
        """See `Attention`."""
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
        return self._attend(q_THD, keys_RGLD, values_RGLD, batch).flatten(1)

    def _attend(
        self,
        q_THD: torch.Tensor,
        keys_RGLD: torch.Tensor,
        values_RGLD: torch.Tensor,
        batch: StepBatch,
    ) -> torch.Tensor:
        """The queries over keys and values that are all there: [T, H, D]."""
        out_THD, window = torch.empty_like(q_THD), self._heads.window
        for row in batch.rows.unique().tolist():
            mine = batch.rows == row
            out_THD[mine] = _attend_row(
                q_THD[mine], batch.positions[mine], keys_RGLD[row], values_RGLD[row], window
            )
        return out_THD


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
