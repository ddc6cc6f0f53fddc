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

from quant.int8 import MAX_CODE
from workers.backend import Attention, Forward, Heads, Linear, LinearWeights, StepBatch
from workers.cuda_graphs import CudaGraphs, PassGraphs
from workers.torch_backend import TorchAttention, TorchBackend, TorchLinear

_LEAST_ROWS = 32  # torch._int_mm wants more than 16 on CUDA.
_BLOCK_L = 64  # Keys are read in whole blocks, so that few shapes occur.
_BYTE = 256


class CudaBackend(TorchBackend):
    """See the module's text."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> None:
        super().__init__(dtype, device)

    def linear(self, weights: LinearWeights) -> Linear:
        """Prepare a linear; int8 weights are unpacked on the device."""
        return super().linear(weights) if weights.scale_N is None else Int8Linear(weights, self)

    def attention(self, heads: Heads) -> Attention:
        """Prepare a layer's attention."""
        return _GroupedAttention(heads)

    def launcher(self, forward: Forward) -> Forward:
        """The pass, recorded as CUDA graphs where it is small."""
        if self.device.type != "cuda":
            return super().launcher(forward)
        return PassGraphs(forward, self.device, CudaGraphs())


class Int8Linear(TorchLinear):
    """A linear over int8 weights: products in int8, sums in int32."""

    def _unpacked(self, packed: torch.Tensor, num_outputs: int) -> torch.Tensor:
        """In int8; outputs and inputs keep their padding, as the operator wants multiples of 8."""
        self._num_outputs = num_outputs
        return packed.transpose(1, 2).flatten(2, 3).flatten(0, 1).contiguous()

    def _sums(self, codes_TK: torch.Tensor) -> torch.Tensor:
        """Exact int32 sums; codes of more than 8 bits go byte by byte."""
        left_TK, reach, factor = codes_TK.int(), MAX_CODE, 1
        low_TK = (left_TK + 128) % _BYTE - 128
        sums_TN = self._byte_sums(low_TK)
        while reach < self._max_code:
            left_TK = (left_TK - low_TK) // _BYTE
            low_TK = (left_TK + 128) % _BYTE - 128
            reach, factor = reach * _BYTE + MAX_CODE, factor * _BYTE
            sums_TN = sums_TN + self._byte_sums(low_TK) * factor
        return sums_TN

    def _byte_sums(self, codes_TK: torch.Tensor) -> torch.Tensor:
        num_tokens, num_inputs = codes_TK.shape
        rows = max(_LEAST_ROWS, -(-num_tokens // 8) * 8)
        missing = 0, self._weight_NK.shape[1] - num_inputs, 0, rows - num_tokens
        padded = F.pad(codes_TK.to(torch.int8), missing)
        return self._product(padded)[:num_tokens, : self._num_outputs]

    def _product(self, codes_TK: torch.Tensor) -> torch.Tensor:
        sums: torch.Tensor = torch._int_mm(codes_TK, self._weight_NK.T)
        return sums


class _GroupedAttention(TorchAttention):
    """Rows with as many queries are attended together, their keys padded to the longest row's."""

    def _attend(
        self,
        q_THD: torch.Tensor,
        keys_RGLD: torch.Tensor,
        values_RGLD: torch.Tensor,
        batch: StepBatch,
    ) -> torch.Tensor:
        out_THD = torch.empty_like(q_THD)
        for tokens_Rn in batch.windows:
            rows_R = batch.rows[tokens_Rn[:, 0]]
            out_THD[tokens_Rn] = self._attend_rows(
                q_THD[tokens_Rn],
                batch.positions[tokens_Rn],
                rows_R,
                keys_RGLD,
                values_RGLD,
                batch.longest,
            )
        return out_THD

    def _attend_rows(
        self,
        q_RnHD: torch.Tensor,
        positions_Rn: torch.Tensor,
        rows_R: torch.Tensor,
        keys_RGLD: torch.Tensor,
        values_RGLD: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
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
