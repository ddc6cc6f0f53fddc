"""The target model: one compact decoder for every supported family.

Its only inputs are ragged passes (`StepBatch`): prefill, plain decoding and verification are the same
call with more or fewer tokens a row. It knows neither families nor devices; the checkpoint's
architecture and the backend decide.

Legend: T tokens, n tokens with logits, V vocabulary, H query heads, G key/value heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quant.architecture import Architecture
from quant.config import Precision
from quant.convert import Piece, to_torch
from quant.int8 import MAX_CODE, dequantize_rows, max_activation_code
from workers.backend import Backend, KVCache, Linear, LinearWeights, StepBatch, TorchBackend
from workers.cpu import CpuBackend


@dataclass(frozen=True)
class _Layer:
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    window: int


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
        head_code = max_activation_code(architecture.hidden_size)
        self._head = _linear(outer, head, backend, head_code)
        self._layers = [
            _Layer(
                input_norm=_tensor(piece, "input_norm", backend),
                post_norm=_tensor(piece, "post_norm", backend),
                q_norm=_optional(piece, "q_norm", backend),
                k_norm=_optional(piece, "k_norm", backend),
                qkv=_linear(piece, "qkv", backend),
                o=_linear(piece, "o", backend),
                gate_up=_linear(piece, "gate_up", backend),
                down=_linear(piece, "down", backend),
                window=window,
            )
            for piece, window in zip(layers, architecture.windows, strict=True)
        ]
        self._cos, self._sin = _rotary_table(architecture, max_len, backend)

    def new_cache(self, num_rows: int, max_len: int) -> KVCache:
        """A cache for `num_rows` rows of at most `max_len` positions."""
        return self.backend.new_cache(self.architecture, num_rows, max_len)

    def forward(self, batch: StepBatch, cache: KVCache) -> torch.Tensor:
        """Run one pass, writing the tokens' keys and values to the cache.

        Returns:
            Logits [n, V] of the tokens `batch.logit_indices` names, in the backend's dtype.
        """
        backend, eps = self.backend, self.architecture.norm_eps
        x_TC = self._embed(batch.token_ids)
        rotation = self._cos[batch.positions], self._sin[batch.positions]
        for index, layer in enumerate(self._layers):
            h_TC = backend.rms_norm(x_TC, layer.input_norm, eps)
            x_TC = x_TC + layer.o(self._attention(h_TC, layer, index, rotation, batch, cache))
            h_TC = backend.rms_norm(x_TC, layer.post_norm, eps)
            x_TC = x_TC + layer.down(backend.silu_mul(layer.gate_up(h_TC)))
        x_nC = backend.rms_norm(x_TC[batch.logit_indices], self._final_norm, eps)
        return self._head(x_nC)

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

    def _attention(
        self,
        h_TC: torch.Tensor,
        layer: _Layer,
        index: int,
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: StepBatch,
        cache: KVCache,
    ) -> torch.Tensor:
        a, backend = self.architecture, self.backend
        heads = layer.qkv(h_TC).view(len(h_TC), -1, a.head_dim)
        q_THD, k_TGD, v_TGD = heads.split([a.num_heads, a.num_kv_heads, a.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q_THD = backend.rms_norm(q_THD, layer.q_norm, a.norm_eps)
            k_TGD = backend.rms_norm(k_TGD, layer.k_norm, a.norm_eps)
        backend.store(cache, index, backend.rotate(k_TGD, *rotation), v_TGD, batch)
        q_THD = backend.rotate(q_THD, *rotation)
        mixed_THD = backend.attend(q_THD, cache, index, batch, layer.window)
        return mixed_THD.reshape(len(h_TC), -1)


def build_backend(precision: Precision) -> Backend:
    """The CPU backend for the working precisions, plain torch for the float references."""
    if precision == "float64":
        return TorchBackend(torch.float64)
    if precision == "float32":
        return TorchBackend(torch.float32)
    return CpuBackend()


def _tensor(piece: Piece, name: str, backend: Backend) -> torch.Tensor:
    return to_torch(piece[name]).to(backend.device)


def _optional(piece: Piece, name: str, backend: Backend) -> torch.Tensor | None:
    return _tensor(piece, name, backend) if name in piece else None


def _linear(piece: Piece, name: str, backend: Backend, max_code: int = MAX_CODE) -> Linear:
    return backend.linear(
        LinearWeights(
            weight_NK=_tensor(piece, f"{name}.weight", backend),
            scale_N=_optional(piece, f"{name}.scale", backend),
            bias_N=_optional(piece, f"{name}.bias", backend),
            max_code=max_code,
        )
    )


def _rotary_table(
    architecture: Architecture, max_len: int, backend: Backend
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [max_len, D / 2], computed once so that every pass reads the same bits."""
    inv_freq = torch.tensor(architecture.rope_inv_freq, dtype=torch.float32)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inv_freq).double()
    scaling = architecture.rope_scaling
    tables = angles.cos() * scaling, angles.sin() * scaling
    cos, sin = (table.to(backend.device, backend.dtype) for table in tables)
    return cos, sin
