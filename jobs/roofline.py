"""How near the model's passes come to the raw matrix kernels of this machine.

The raw time of a pass is that of its products alone, on activations that are quantized already, one
linear after the other as the model needs them, so that weights come from memory. Both are timed in turn.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quant.architecture import Architecture
from quant.convert import Piece
from quant.int8 import MAX_CODE, PACK_N, PACK_STEP
from workers import matmul, tiles
from workers.backend import KVCache, Linear, LinearWeights, StepBatch
from workers.cpu import CpuBackend, uses_vnni
from workers.model import TargetModel

_LEAST_REPEATS, _MOST_REPEATS, _SECONDS = 3, 7, 10.0
_DECODE_ROWS = (1, 4, 16, 32)
_CONTEXT, _CONTEXT_ROWS = 500, 16
_PROMPT, _CHUNK = 1000, 512


def measure_roofline(architecture: Architecture, pieces: list[Piece]) -> list[dict[str, Any]]:
    """Time decode steps and a prefill; a record each, seconds being medians.

    `matrix` is what the linears take (with the quantization and what else is fused with them), `step`
    the whole pass, `raw` the products alone.
    """
    backend = _TimedBackend()
    longest = max(_CONTEXT, _PROMPT) + 1
    model = TargetModel(architecture, pieces, backend, longest)
    cache = model.new_cache(max(_DECODE_ROWS), longest)
    cache.keys.zero_()
    cache.values.zero_()
    named = [(f"decode, {n} rows", [_decode(n, 15)]) for n in _DECODE_ROWS]
    named.append(
        (f"decode, {_CONTEXT_ROWS} rows, context {_CONTEXT}", [_decode(_CONTEXT_ROWS, _CONTEXT)])
    )
    named.append((f"prefill, {_PROMPT} tokens", _prefill(_PROMPT)))
    return [{"pass": name} | _measure(model, backend, cache, batches) for name, batches in named]


def _measure(
    model: TargetModel, backend: "_TimedBackend", cache: KVCache, batches: list[StepBatch]
) -> dict[str, float]:
    raw, matrix, step = [], [], []
    products = [product for batch in batches for product in backend.products(batch)]
    until = time.perf_counter() + _SECONDS
    for repeat in range(_MOST_REPEATS + 1):
        started = time.perf_counter()
        if repeat > _LEAST_REPEATS and started > until:
            break
        for product in products:
            product()
        between = time.perf_counter()
        backend.seconds = 0.0
        for batch in batches:
            model.forward(batch, cache)
        if repeat:  # The first one warms up.
            raw.append(between - started)
            matrix.append(backend.seconds)
            step.append(time.perf_counter() - between)
    medians = {
        name: statistics.median(values)
        for name, values in (("raw", raw), ("matrix", matrix), ("step", step))
    }
    return {
        **{f"{name}_seconds": seconds for name, seconds in medians.items()},
        "raw_of_matrix": statistics.median(r / m for r, m in zip(raw, matrix, strict=True)),
        "raw_of_step": statistics.median(r / s for r, s in zip(raw, step, strict=True)),
    }


def _decode(num_rows: int, position: int) -> StepBatch:
    index = torch.arange(num_rows)
    return StepBatch(torch.zeros_like(index), index, torch.full_like(index, position), index)


def _prefill(length: int) -> list[StepBatch]:
    """One prompt in chunks, logits wanted for its last token."""
    batches = []
    for start in range(0, length, _CHUNK):
        positions = torch.arange(start, min(start + _CHUNK, length))
        zeros = torch.zeros_like(positions)
        is_last = positions[-1] == length - 1
        wanted = torch.tensor([len(positions) - 1] if is_last else [], dtype=torch.int64)
        batches.append(StepBatch(zeros, zeros, positions, wanted))
    return batches


class _TimedBackend(CpuBackend):
    """The CPU backend with a clock on its linears: the head's first, then each layer's four."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self._weights: list[LinearWeights] = []

    def linear(self, weights: LinearWeights) -> Linear:
        self._weights.append(weights)
        return _TimedLinear(super().linear(weights), self)

    def timed(self, call: Callable[..., Any], *args: Any) -> Any:
        started = time.perf_counter()
        result = call(*args)
        self.seconds += time.perf_counter() - started
        return result

    def products(self, batch: StepBatch) -> list[Callable[[], None]]:
        """The products of a pass: what follows the last attention is computed for logits only."""
        num_tokens, num_wanted = len(batch.token_ids), len(batch.logit_indices)
        head, *layers = self._weights
        sizes = [num_tokens] * (len(layers) - 3) + [num_wanted] * 4
        ordered = zip([*layers, head], sizes, strict=True)
        return [_product(weights, size) for weights, size in ordered if size]


@dataclass(frozen=True)
class _TimedLinear:
    linear: Linear
    backend: _TimedBackend

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.backend.timed(self.linear, x_TK)
        return result

    def of_norm(self, x_TK: torch.Tensor, gain_K: torch.Tensor, eps: float) -> torch.Tensor:
        result: torch.Tensor = self.backend.timed(self.linear.of_norm, x_TK, gain_K, eps)
        return result

    def add_to_(self, x_TN: torch.Tensor, h_TK: torch.Tensor) -> None:
        self.backend.timed(self.linear.add_to_, x_TN, h_TK)

    def add_silu_to_(self, x_TN: torch.Tensor, gate_up_TJ: torch.Tensor) -> None:
        self.backend.timed(self.linear.add_silu_to_, x_TN, gate_up_TJ)


def _product(weights: LinearWeights, num_tokens: int) -> Callable[[], None]:
    """The kernel of a linear on activations of no meaning."""
    if weights.scale_N is None:
        num_outputs, num_inputs = weights.weight.shape
        num_inputs = -(-num_inputs // tiles.TILE_K) * tiles.TILE_K
        x_TK = np.ones((num_tokens, num_inputs), np.float32)
        bits = (
            torch.ones((num_outputs, num_inputs), dtype=torch.bfloat16).view(torch.uint16).numpy()
        )
        bias, out = (
            np.zeros(num_outputs, np.float32),
            np.empty((num_tokens, num_outputs), np.float32),
        )
        return lambda: matmul.matmul_bf16(x_TK, bits, bias, False, out)
    num_outputs = len(weights.scale_N)
    padded = -(-num_outputs // PACK_N) * PACK_N
    num_inputs = weights.weight.numel() // padded
    assert num_inputs % PACK_STEP == 0
    num_bytes = 1 if weights.max_code <= MAX_CODE else 2
    if uses_vnni(weights):
        kernel, codes = matmul.matmul_vnni, np.ones((num_tokens, num_bytes, num_inputs), np.int8)
    else:
        kernel, codes = matmul.matmul_int8, np.ones((num_tokens, num_inputs), np.int16)
    scale_T, vector = np.ones(num_tokens, np.float32), np.ones(padded, np.float32)
    out = np.empty((num_tokens, num_outputs), np.float32)
    address = weights.weight.contiguous().data_ptr()
    return lambda: kernel(codes, scale_T, address, vector, vector, False, out)
