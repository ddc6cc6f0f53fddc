"""The CUDA backend in its plain form: int8 products by torch._int_mm, attention by torch's own.

Sums of int8 products are exact, so a W8A8 linear gives a token the same bits alone and in company.
Torch's attention and norms round by their shapes, so that a near tie between two tokens can still turn
out either way; the CPU backend alone holds that promise bit by bit.

The class runs on any device torch has, which is how it is tested where there is no GPU.

Legend: T tokens of a pass, n queries of a row, R rows, H query heads, G key/value heads, D head size,
K inputs, N outputs, L positions.
"""

import torch
import torch.nn.functional as F

from quant.decoder import rms_norm, rotate
from quant.int8 import MAX_CODE, quantize_rows
from workers.backend import (
    Attention,
    Heads,
    KVCache,
    Linear,
    LinearWeights,
    StepBatch,
    TorchBackend,
    TorchLinear,
)

_LEAST_ROWS = 32  # torch._int_mm wants more than 16 on CUDA.
_BLOCK_L = 64  # Keys are read in whole blocks, so that few shapes occur.
_BYTE = 256


class CudaBackend(TorchBackend):
    """See the module's text."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> None:
        super().__init__(dtype, device)

    def linear(self, weights: LinearWeights) -> Linear:
        """Prepare a linear; int8 weights are unpacked on the device."""
        return super().linear(weights) if weights.scale_N is None else _Int8Linear(weights, self)

    def attention(self, heads: Heads) -> Attention:
        """Prepare a layer's attention."""
        return _GroupedAttention(heads)


class _Int8Linear(TorchLinear):
    def __init__(self, weights: LinearWeights, backend: TorchBackend) -> None:
        assert weights.scale_N is not None
        self._dtype, self._max_code = backend.dtype, weights.max_code
        self._scales_N = weights.scale_N.to(backend.device)
        self._bias_N = None
        if weights.bias_N is not None:
            self._bias_N = weights.bias_N.to(backend.device, backend.dtype)
        # Outputs and inputs keep their padding: the operator wants multiples of 8.
        packed = weights.weight.to(backend.device)
        self._weight_NK = packed.transpose(1, 2).flatten(2, 3).flatten(0, 1).contiguous()

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        codes_TK, scale_T = quantize_rows(x_TK, self._max_code)
        left_TK, reach, factor = codes_TK.int(), MAX_CODE, 1
        low_TK = (left_TK + 128) % _BYTE - 128  # Codes of more than 8 bits, byte by byte.
        sums_TN = self._sums(low_TK)
        while reach < self._max_code:
            left_TK = (left_TK - low_TK) // _BYTE
            low_TK = (left_TK + 128) % _BYTE - 128
            reach, factor = reach * _BYTE + MAX_CODE, factor * _BYTE
            sums_TN = sums_TN + self._sums(low_TK) * factor
        y_TN = (sums_TN.float() * self._scales_N * scale_T[:, None]).to(self._dtype)
        return y_TN if self._bias_N is None else y_TN + self._bias_N

    def _sums(self, codes_TK: torch.Tensor) -> torch.Tensor:
        """Exact int32 sums [T, N]."""
        num_tokens, num_inputs = codes_TK.shape
        rows = max(_LEAST_ROWS, -(-num_tokens // 8) * 8)
        missing = 0, self._weight_NK.shape[1] - num_inputs, 0, rows - num_tokens
        padded = F.pad(codes_TK.to(torch.int8), missing)
        sums: torch.Tensor = torch._int_mm(padded, self._weight_NK.T)
        return sums[:num_tokens, : len(self._scales_N)]


class _GroupedAttention:
    """Rows with as many queries are attended together, their keys padded to the longest row's."""

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
        for tokens_Rn in batch.windows:
            out_THD[tokens_Rn] = self._attend(
                q_THD[tokens_Rn],
                batch.positions[tokens_Rn],
                batch.rows[tokens_Rn[:, 0]],
                keys_RGLD,
                values_RGLD,
            )
        return out_THD.flatten(1)

    def _attend(
        self,
        q_RnHD: torch.Tensor,
        positions_Rn: torch.Tensor,
        rows_R: torch.Tensor,
        keys_RGLD: torch.Tensor,
        values_RGLD: torch.Tensor,
    ) -> torch.Tensor:
        longest = int(positions_Rn.max()) + 1
        length = min(-(-longest // _BLOCK_L) * _BLOCK_L, keys_RGLD.shape[2])
        k_RGLD, v_RGLD = keys_RGLD[rows_R, :, :length], values_RGLD[rows_R, :, :length]
        at_L = torch.arange(length, device=q_RnHD.device)
        seen_RnL = at_L <= positions_Rn[:, :, None]
        if self._heads.window:
            seen_RnL &= at_L > positions_Rn[:, :, None] - self._heads.window
        # What was never written may be NaN, and NaN times a weight of 0 is NaN.
        written_RL = at_L <= positions_Rn.amax(dim=1, keepdim=True)
        v_RGLD = v_RGLD.masked_fill(~written_RL[:, None, :, None], 0)
        k_RGLD = k_RGLD.masked_fill(~written_RL[:, None, :, None], 0)
        num_kv_heads, repeats = k_RGLD.shape[1], q_RnHD.shape[2] // k_RGLD.shape[1]
        # The query heads of a group are further queries of its key/value head.
        folded = q_RnHD.unflatten(2, (num_kv_heads, repeats)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = seen_RnL[:, None].expand(-1, repeats, -1, -1).flatten(1, 2)[:, None]
        mixed = F.scaled_dot_product_attention(
            folded, k_RGLD.to(folded.dtype), v_RGLD.to(folded.dtype), attn_mask=mask
        )
        out_RnHD: torch.Tensor = (
            mixed.unflatten(2, (repeats, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)
        )
        return out_RnHD
