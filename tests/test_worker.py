"""One engine, many callers: everybody gets their own completions, and everybody hears of a failure."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any

import pytest

import workers.actor
from tests.fakes import make_engine, make_model, make_requests
from workers.actor import Worker, worker_environment
from workers.build import build_proposer
from workers.config import EngineConfig, SamplingParams
from workers.request import Completion, Request

TIMEOUT = 30


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(main(), TIMEOUT)

    return asyncio.run(bounded())


async def collect(completions: AsyncIterator[Completion]) -> list[Completion]:
    return [completion async for completion in completions]


class EchoEngine:
    """Finishes one request a step, the newest first; fails on the request called `bad`."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.num_steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    def add(self, requests: Iterable[Request]) -> None:
        self.waiting += requests

    def step(self) -> list[Completion]:
        self.num_steps += 1
        request = self.waiting.pop()
        if request.id == "bad":
            raise MemoryError("no room")
        return [Completion(request, "length", token_ids=request.prompt_token_ids)]


def request(name: str, sample_idx: int = 0) -> Request:
    return Request(name, (1, 2), SamplingParams(), seed=0, sample_idx=sample_idx)


def worker_of(engine: Any) -> Worker:
    return Worker(lambda: engine)


def test_many_callers_get_their_own() -> None:
    worker = worker_of(EchoEngine())

    async def main() -> list[list[Completion]]:
        return await asyncio.gather(
            *(collect(worker.submit([request(f"{i}-{j}") for j in range(i)])) for i in range(6))
        )

    for i, completions in enumerate(run(main)):
        assert sorted(c.request.id for c in completions) == [f"{i}-{j}" for j in range(i)]


def test_equal_requests_are_told_apart() -> None:
    """The same id, sample and prompt from two callers, and twice from one."""
    worker = worker_of(EchoEngine())

    async def main() -> list[list[Completion]]:
        return await asyncio.gather(
            collect(worker.submit([request("a"), request("a")])),
            collect(worker.submit([request("a")])),
        )

    assert [len(completions) for completions in run(main)] == [2, 1]


def test_completions_come_as_they_finish_and_later_callers_are_served() -> None:
    worker = worker_of(EchoEngine())

    async def main() -> None:
        first = worker.submit([request("a"), request("b")])
        one = await anext(first)
        assert [c.request.id for c in await collect(worker.submit([request("c")]))] == ["c"]
        two = await anext(first)
        assert {one.request.id, two.request.id} == {"a", "b"}
        with pytest.raises(StopAsyncIteration):
            await anext(first)

    run(main)


def test_a_worker_that_waits_does_not_spin() -> None:
    engine = EchoEngine()
    worker = worker_of(engine)

    async def main() -> None:
        await collect(worker.submit([request("a")]))
        await asyncio.sleep(0.1)

    run(main)
    assert engine.num_steps == 1


async def fails(awaitable: Awaitable[Any]) -> BaseException | None:
    with pytest.raises(RuntimeError, match="the engine failed") as raised:
        await awaitable
    return raised.value.__cause__


def test_a_failure_reaches_present_and_later_callers() -> None:
    worker = worker_of(EchoEngine())

    async def main() -> list[BaseException | None]:
        # All are queued before the engine sees the first; it takes the newest of what it has.
        present = [worker.submit([request(name)]) for name in ("a", "b")]
        bad = worker.submit([request("bad"), *(request(f"x{i}") for i in range(50))])
        causes = [await fails(collect(bad))]
        for completions in present:  # Answered before, or told.
            try:
                assert len(await collect(completions)) == 1
            except RuntimeError as error:
                causes.append(error.__cause__)
        for _ in range(3):
            causes.append(await fails(collect(worker.submit([request("late"), request("later")]))))
        return causes

    causes = run(main)
    assert len(causes) >= 4
    for cause in causes:
        assert isinstance(cause, MemoryError)
        assert str(cause) == "no room"


def test_present_callers_are_told() -> None:
    """Two callers wait on one engine that dies in its first step: neither hangs."""

    class DeadEngine(EchoEngine):
        def step(self) -> list[Completion]:
            raise ZeroDivisionError

    worker = worker_of(DeadEngine())

    async def main() -> list[Any]:
        return await asyncio.gather(
            *(fails(collect(worker.submit([request(f"{i}")]))) for i in range(4))
        )

    assert [type(cause) for cause in run(main)] == [ZeroDivisionError] * 4


def test_nothing_to_do_is_done() -> None:
    worker = worker_of(EchoEngine())
    assert run(lambda: collect(worker.submit([]))) == []


def test_a_real_engine_behind_two_callers() -> None:
    """Tokens do not depend on how requests are spread over callers."""

    def engine() -> Any:
        proposer = build_proposer(EngineConfig())
        return make_engine(make_model("float64"), proposer, 3, 64, 48, 5)

    requests = make_requests(temperature=1.0)
    expected = {c.request.id: c.token_ids for c in engine().generate(requests)}
    worker = worker_of(engine())

    async def main() -> list[list[Completion]]:
        return await asyncio.gather(
            collect(worker.submit(requests[1::2])), collect(worker.submit(requests[::2]))
        )

    one, two = run(main)
    assert [len(one), len(two)] == [3, 3]
    assert {c.request.id: c.token_ids for c in (*one, *two)} == expected
    assert worker.device.startswith("cpu:")


def test_the_environment_bounds_the_threads() -> None:
    environment = worker_environment(3)
    assert environment["NUMBA_NUM_THREADS"] == "3"
    assert all(isinstance(value, str) for value in environment.values())


@pytest.mark.parametrize(("layer", "num_warnings"), [("omp", 0), ("workqueue", 1)])
def test_a_machine_without_openmp_is_told_of(
    layer: str,
    num_warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(workers.actor.numba, "threading_layer", lambda: layer)
    monkeypatch.setattr(workers.actor.numba, "get_num_threads", lambda: 2)
    workers.actor._check_threads()
    assert [("libgomp1" in r.getMessage()) for r in caplog.records] == [True] * num_warnings


def test_an_engine_that_cannot_be_built_is_told_to_every_caller() -> None:
    def build() -> Any:
        raise ValueError("no weights")

    worker = Worker(build)

    async def main() -> None:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the engine failed") as caught:
                await collect(worker.submit([request("a")]))
            assert str(caught.value.__cause__) == "no weights"

    run(main)
