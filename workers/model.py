"""The target model: one compact decoder for every supported family.

Its only inputs are ragged passes (`StepBatch`): prefill, plain decoding and verification are the same
call with more or fewer tokens a row. It knows neither families nor devices; the checkpoint's
architecture and the backend decide.

Legend: T tokens, n tokens with logits, V vocabulary, C model width, J width of a fused projection,
D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quant.architecture import Architecture
from quant.config import Precision
from quant.convert import Piece, to_torch
from quant.decoder import rotary_table
from quant.int8 import MAX_CODE, dequantize_rows
from workers.backend import Attention, Backend, Heads, KVCache, Linear, LinearWeights, StepBatch
from workers.config import Device
from workers.cpu import CpuBackend
from workers.cuda import CudaBackend
from workers.npu import NpuBackend
from workers.torch_backend import TorchBackend


@dataclass(frozen=True)
class _Layer:
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: Linear
    attention: Attention
    o: Linear
    gate_up: Linear
    down: Linear


class TargetModel:
    """A decoder over converted weights (see `quant.convert`)."""

    def __init__(
        self, architecture: Architecture, pieces: Sequence[Piece], backend: Backend, max_len: int
    ) -> None:
        """Wire the pieces up.

        Args:
            architecture: the checkpoint's shape.
            pieces: what `convert` yields; kept by reference, not copied.
            backend: the device to run on.
            max_len: positions the rotary table must cover.
        """
        self.architecture = architecture
        self.backend = backend
        outer, *layers = pieces
        self._embeddings = _tensor(outer, "embeddings.weight", backend)
        self._embedding_scale = _optional(outer, "embeddings.scale", backend)
        self._final_norm = _tensor(outer, "final_norm", backend)
        head = "head" if "head.weight" in outer else "embeddings"
        self._head = _linear(outer, head, backend)
        # Computed once, so that every pass reads the same bits.
        cos, sin = (
            table.to(backend.device, backend.dtype) for table in rotary_table(architecture, max_len)
        )
        self._launch = backend.launcher(self._pass)
        self._layers = [
            _Layer(
                input_norm=_tensor(piece, "input_norm", backend),
                post_norm=_tensor(piece, "post_norm", backend),
                qkv=_linear(piece, "qkv", backend),
                attention=backend.attention(
                    Heads(
                        layer=index,
                        window=window,
                        q_gain=_optional(piece, "q_norm", backend),
                        k_gain=_optional(piece, "k_norm", backend),
                        eps=architecture.norm_eps,
                        cos=cos,
                        sin=sin,
                    )
                ),
                o=_linear(piece, "o", backend),
                gate_up=_linear(piece, "gate_up", backend),
                down=_linear(piece, "down", backend),
            )
            for index, (piece, window) in enumerate(zip(layers, architecture.windows, strict=True))
        ]

    def new_cache(self, num_rows: int, max_len: int) -> KVCache:
        """A cache for `num_rows` rows of at most `max_len` positions."""
        return self.backend.new_cache(self.architecture, num_rows, max_len)

    def forward(self, batch: StepBatch, cache: KVCache) -> torch.Tensor:
        """Run one pass, writing the tokens' keys and values to the cache.

        Returns:
            Logits [n, V] of the tokens `batch.logit_indices` names, in the backend's dtype.
        """
        return self._launch(batch, cache)

    def _pass(self, batch: StepBatch, cache: KVCache) -> torch.Tensor:
        eps = self.architecture.norm_eps
        x_TC = self._embed(batch.token_ids)
        for layer in self._layers:
            qkv_TJ = layer.qkv.of_norm(x_TC, layer.input_norm, eps)
            mixed_TJ = layer.attention(qkv_TJ, cache, batch)
            if layer is self._layers[-1]:
                # The cache is complete; from here only logits are wanted.
                x_TC, mixed_TJ = x_TC[batch.logit_indices], mixed_TJ[batch.logit_indices]
            layer.o.add_to_(x_TC, mixed_TJ)
            gate_up_TJ = layer.gate_up.of_norm(x_TC, layer.post_norm, eps)
            layer.down.add_silu_to_(x_TC, gate_up_TJ)
        return self._head.of_norm(x_TC, self._final_norm, eps)

    def warm_up(self) -> None:
        """Run a small pass, so that kernels are compiled before the first row is timed."""
        tokens = torch.zeros(2, dtype=torch.int64)
        positions = torch.arange(2)
        self.forward(StepBatch(tokens, tokens, positions, positions), self.new_cache(1, 2))

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = self._embeddings[token_ids]
        if self._embedding_scale is None:
            return rows.to(self.backend.dtype)
        return dequantize_rows(rows, self._embedding_scale[token_ids]).to(self.backend.dtype)


def build_backend(precision: Precision, device: Device = "cpu") -> Backend:
    """The device's backend for the working precisions, plain torch for the float references."""
    if precision == "float64":
        return TorchBackend(torch.float64, device)
    if precision == "float32":
        return TorchBackend(torch.float32, device)
    if device == "npu":
        return NpuBackend()
    return CudaBackend(device=device) if device == "cuda" else CpuBackend()


def _tensor(piece: Piece, name: str, backend: Backend) -> torch.Tensor:
    return to_torch(piece[name]).to(backend.device)


def _optional(piece: Piece, name: str, backend: Backend) -> torch.Tensor | None:
    return _tensor(piece, name, backend) if name in piece else None


def _linear(piece: Piece, name: str, backend: Backend) -> Linear:
    max_code = piece.get(f"{name}.max_code")
    return backend.linear(
        LinearWeights(
            weight=_tensor(piece, f"{name}.weight", backend),
            scale_N=_optional(piece, f"{name}.scale", backend),
            bias_N=_optional(piece, f"{name}.bias", backend),
            max_code=MAX_CODE if max_code is None else int(max_code[0]),
        )
    )
