"""The CUDA backend: on the CPU, where torch's operators do the same, and on a GPU where there is one."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quant.int8 import max_activation_code, pack
from tests.fakes import TINY, make_engine, make_pieces, make_requests, one_thread  # noqa: F401
from tests.reference import reference_answer
from workers.backend import Forward, KVCache, LinearWeights, StepBatch
from workers.budget import DraftBudget
from workers.build import build_proposer
from workers.config import EngineConfig
from workers.cuda import CudaBackend
from workers.cuda_graphs import PassGraphs
from workers.model import TargetModel
from workers.step_times import StepTimes
from workers.torch_backend import TorchBackend

# float64 activations meet float32 gains: torch says once that it takes the slower way.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]
ON_GPU = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
)
EVERY_DEVICE = pytest.mark.parametrize("device", ["cpu", ON_GPU])


@cache
def make_model(device: str, dtype: torch.dtype = torch.float64) -> TargetModel:
    return TargetModel(TINY, make_pieces("w8a8"), CudaBackend(dtype, device), max_len=128)


@EVERY_DEVICE
@pytest.mark.parametrize("num_rows", [1, 3, 32, 45])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(16, 8), (67, 41), (96, 200)])
@pytest.mark.parametrize("wide", [False, True])
def test_a_linear_is_the_reference_ones(
    wide: bool, num_outputs: int, num_inputs: int, num_rows: int, device: str
) -> None:
    """Sums are exact in both, so the results are equal to the last bit."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-127, 128, (num_outputs, num_inputs), generator=generator)
    weights = LinearWeights(
        pack(codes.to(torch.int8)),
        torch.rand(num_outputs, generator=generator) + 0.1,
        torch.randn(num_outputs, generator=generator),
        max_activation_code(num_inputs) if wide else 127,
    )
    x_TK = torch.randn(num_rows, num_inputs, generator=generator)
    got = CudaBackend(torch.float32, device).linear(weights)(x_TK.to(device)).cpu()
    expected = TorchBackend(torch.float32).linear(weights)(x_TK)
    torch.testing.assert_close(got, expected, rtol=0, atol=0 if device == "cpu" else 1e-6)


@pytest.mark.parametrize("x", [-127, 127])
def test_nothing_saturates(x: int) -> None:
    weights = LinearWeights(pack(torch.full((16, 512), 127, dtype=torch.int8)), torch.ones(16))
    linear = CudaBackend(torch.float32, "cpu").linear(weights)
    y = linear(torch.full((4, 512), float(x)))
    assert (y == torch.full((), x * 127 * 512).float()).all()


@EVERY_DEVICE
def test_logits_are_the_reference_ones(device: str) -> None:
    """A pass with a prompt, a decoding row and a window of drafts, in any order, behind other passes."""
    models = [
        make_model(device),
        TargetModel(TINY, make_pieces("w8a8"), TorchBackend(torch.float64), max_len=128),
    ]
    rng = np.random.default_rng(5)
    tokens = torch.from_numpy(rng.integers(0, TINY.vocab_size, 24))
    logits = []
    for model in models:
        cache = model.new_cache(4, 100)
        cache.keys.fill_(torch.nan)  # What was never written is never seen.
        cache.values.fill_(torch.nan)
        first = StepBatch(
            tokens[:14],
            torch.tensor([0] * 9 + [2] * 5),
            torch.tensor([*range(9), *range(5)]),
            torch.tensor([8, 13]),
        )
        second = StepBatch(
            tokens[14:],
            torch.tensor([0, 2, 2, 2, 2, 3, 3, 3, 3, 1]),
            torch.tensor([9, 5, 6, 7, 8, 0, 1, 2, 3, 0]),
            torch.arange(10),
        )
        with torch.inference_mode():
            logits.append([model.forward(batch, cache).cpu() for batch in (first, second)])
    for got, expected in zip(*logits, strict=True):
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@EVERY_DEVICE
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("proposer", ["none", "ngram", "suffix"])
def test_drafts_change_no_token(proposer: str, temperature: float, device: str) -> None:
    """In float64, where rounding decides nothing."""
    model = make_model(device)
    wanted = make_requests(temperature=temperature)
    expected = {r.id: reference_answer(model, r, 48).token_ids for r in wanted}
    proposers = build_proposer(EngineConfig.model_validate({"proposer": proposer}))
    for num_spec in (1, 5):
        for budget in (None, DraftBudget(StepTimes((1, 64), (1.0, 1.4)))):
            engine = make_engine(model, proposers, 4, 16, 48, num_spec, budget)
            found = {c.request.id: c.token_ids for c in engine.generate(wanted)}
            assert found == expected


@EVERY_DEVICE
def test_working_precision_answers_nearly_alike(device: str) -> None:
    batch = StepBatch(
        torch.arange(12), torch.zeros(12, dtype=torch.int64), torch.arange(12), torch.arange(12)
    )
    logits = []
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float64):
            model = make_model(device, dtype)
            logits.append(model.forward(batch, model.new_cache(1, 12)).double().cpu())
    error = (logits[0] - logits[1]).norm() / logits[1].norm()
    assert error < 0.1


class Tape(TorchDispatchMode):
    """A recording as CUDA makes them, on any device: the same operators on the same memory again.

    What would make the host wait for a result cannot be recorded, nor what has no fixed shape.
    """

    num_recorded = 0

    def __init__(self) -> None:
        super().__init__()
        self._operators: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        if func.overloadpacket in {
            aten.item,
            aten._local_scalar_dense,
            aten.nonzero,
            aten._unique2,
        }:
            raise RuntimeError(f"{func} makes the host wait")
        result = func(*args, **(kwargs or {}))
        self._operators.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self._operators:
            for old, new in zip(_tensors(result), _tensors(func(*args, **kwargs)), strict=True):
                old.copy_(new)


def _tensors(result: Any) -> list[torch.Tensor]:
    found = result if isinstance(result, list | tuple) else [result]
    return [item for item in found if isinstance(item, torch.Tensor)]


def record(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    with Tape() as tape:
        result = run()
    Tape.num_recorded += 1

    def replay() -> torch.Tensor:
        tape.replay()
        return result

    return replay


class GraphBackend(CudaBackend):
    """Small passes recorded, where there is no GPU to do so."""

    def launcher(self, forward: Forward) -> Forward:
        return PassGraphs(forward, self.device, record)


def test_recorded_passes_answer_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that come, grow past a length and go; batches of every size; drafts."""
    monkeypatch.setattr(Tape, "num_recorded", 0)
    pieces = make_pieces("w8a8")
    model = TargetModel(TINY, pieces, GraphBackend(torch.float64, "cpu"), max_len=128)
    plain = make_model("cpu")
    wanted = [
        *make_requests(temperature=0.0, max_tokens=70),
        *make_requests(temperature=1.0, max_tokens=70),
    ]
    expected = [reference_answer(plain, r, 100).token_ids for r in wanted]
    proposers = build_proposer(EngineConfig())
    engine = make_engine(model, proposers, 3, 16, 100, 5, None)
    found = {id(c.request): c.token_ids for c in engine.generate(wanted)}
    assert [found[id(r)] for r in wanted] == expected
    assert 2 <= Tape.num_recorded <= 6, "few sizes, each recorded once"


def test_passes_too_large_or_not_recordable_run_as_they_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = CudaBackend(torch.float64, "cpu")
    calls = []

    def forward(batch: StepBatch, cache: KVCache) -> torch.Tensor:
        calls.append(len(batch.token_ids))
        return torch.tensor([float(batch.positions.max())])

    cache = backend.new_cache(TINY, 2, 4096)
    launch = PassGraphs(forward, backend.device, record)
    for num_tokens, first in [(65, 0), (64, 3000), (3, 0)]:
        column = torch.arange(num_tokens)
        batch = StepBatch(column, torch.zeros_like(column), column + first, column[-1:])
        assert launch(batch, cache).item() == first + num_tokens - 1
    assert calls == [65, 64, 8, 3], "the last was to be recorded, and could not be"
    assert "passes are not recorded as CUDA graphs" in caplog.text
    launch(batch, cache)
    assert calls[-1] == 3
