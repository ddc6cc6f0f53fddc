"""The pool of workers, with workers that need no engine: who gets which shard, and what deaths do."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pipeline import places, pool
from pipeline.cluster import ClusterConfig
from pipeline.errors import WorkerLostError
from pipeline.places import Kind
from pipeline.pool import WorkerPool
from pipeline.probe import Probe
from pipeline.shard_worker import WorkerState

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]


@dataclass(frozen=True)
class Worker:
    num_threads: int = 0
    device: str = ""


@dataclass(frozen=True)
class Settings:
    """Of which the pool changes the worker."""

    worker: Worker = field(default_factory=Worker)
    retry: bool = False


class Weights:
    def send(self) -> list[Any]:
        return []


def make_pool(settings: Any = Settings(), num_threads: int = 1, **changed: Any) -> WorkerPool:
    """Of workers that take half a CPU each: six have room."""
    config = ClusterConfig(**changed)
    kinds = [Kind(pool, pool.num_cpus or num_threads) for pool in config.pools]
    return WorkerPool(Weights(), settings, config, kinds)  # type: ignore[arg-type]


def of_rows(shards: list[str]) -> dict[str, int]:
    """Shards with as many rows as their names say behind an `x`."""
    return {shard: int(shard.partition("x")[2] or 1) for shard in shards}


def stub(folder: Path) -> type:  # noqa: C901 - what becomes of a shard is a list of cases
    """A worker whose shards say what becomes of it; each try leaves a file."""
    where = str(folder)

    class Stub:  # Local, so that Ray carries it to its processes by value.
        def __init__(self, weights: Any, settings: Any) -> None:
            self._device = settings.worker.device
            open(os.path.join(where, f"worker-{os.getpid()}"), "x").close()
            self._first = os.path.join(where, "first")
            try:
                os.close(os.open(self._first, os.O_CREAT | os.O_EXCL))
                self._is_first = True
            except FileExistsError:
                self._is_first = False

        async def state(self) -> WorkerState:
            return WorkerState(f"stub:{os.getpid()}", {"num_tokens": 7})

        async def probe(self, shard: str) -> dict[str, list[int]]:
            return {"a": [1, 2], "b": [3], "c": [4 if self._device == "cpu" else 5]}

        async def run(self, shard: str, *, is_backup: bool = False) -> Any:  # noqa: C901
            what, _, times = shard.partition(":")[0].partition("*")
            names = await asyncio.to_thread(os.listdir, where)
            tries = sum(name.startswith(f"{shard}.") for name in names)
            open(os.path.join(where, f"{shard}.{tries}"), "x").close()
            if what == "die" and tries < int(times or 10**9):
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "full":
                raise OSError(28, "No space left on device")
            if what == "bug":
                raise ZeroDivisionError("ours")
            while what == "meet" and sum(n.startswith("worker-") for n in os.listdir(where)) < 2:
                await asyncio.sleep(0.02)
            while what == "stuck" and self._is_first:  # Until another worker is at it.
                if sum(n.startswith(f"{shard}.") for n in os.listdir(where)) > 1:
                    break
                await asyncio.sleep(0.02)
            if what == "doomed" and self._is_first:  # Once another has been at it, and is done.
                while sum(n.startswith(f"{shard}.") for n in os.listdir(where)) < 2:
                    await asyncio.sleep(0.02)
                await asyncio.sleep(0.3)
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "declined" and is_backup:  # Once the first has died.
                open(os.path.join(where, f"asked:{shard}"), "x").close()
                await asyncio.sleep(1.5)
                return None
            if what == "declined" and tries == 0:
                while not os.path.exists(os.path.join(where, f"asked:{shard}")):
                    await asyncio.sleep(0.02)
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "fragile" and is_backup:
                return None
            is_slow = self._device == "npu" or (what != "a" and self._is_first)
            await asyncio.sleep(0.5 if is_slow else 0.02)
            return f"{shard} by {os.getpid()}"

    return Stub


Run = Any


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run shards, in the order they were done: [(shard, pid)]."""
    monkeypatch.setattr(places, "ShardWorker", stub(tmp_path))

    def go(shards: list[str], **changed: Any) -> list[tuple[str, str]]:
        reports: Any = list(make_pool(**changed).run(of_rows(shards)))
        return [(shard, pid) for shard, _, pid in (report.partition(" by ") for report in reports)]

    yield go
    assert actors_alive() == 0, "all actors are ended"


def tries_of(folder: Path, shard: str) -> int:
    return len(list(folder.glob(f"{shard}.*")))


def actors_alive() -> int:
    """Stubs that live, once Ray has had the time to end them."""
    from ray._private.state import actors

    deadline, alive = time.monotonic() + 20, 1
    while alive and time.monotonic() < deadline:
        states = [a["State"] for a in actors().values() if a["ActorClassName"] == "Stub"]
        alive = sum(state != "DEAD" for state in states)
        time.sleep(0.05)
    return alive


def test_each_shard_is_done_once(run: Run) -> None:
    shards = [f"meet:{i}" for i in range(30)]
    done = run(shards, num_workers=2, shards_per_worker=3)
    assert sorted(shard for shard, _ in done) == sorted(shards)
    assert len({pid for _, pid in done}) == 2


def test_one_worker_keeps_the_order(run: Run) -> None:
    shards = [f"a:{i}" for i in range(10)]
    assert [shard for shard, _ in run(shards, num_workers=1, shards_per_worker=1)] == shards


def test_who_is_slower_gets_less(run: Run) -> None:
    shards = ["meet:0", *(f"slow:{i}" for i in range(30))]
    done = run(shards, num_workers=2, shards_per_worker=1)
    by_worker = sorted(sum(p == pid for _, p in done) for pid in {pid for _, pid in done})
    assert by_worker[0] <= 8, by_worker
    assert sum(by_worker) == 31


def test_shards_of_a_worker_that_dies_are_done_by_others(run: Run, tmp_path: Path) -> None:
    shards = [f"a:{i}" for i in range(10)] + ["die*1:x", "die*2:y"] + [f"b:{i}" for i in range(10)]
    done = run(shards, num_workers=2, shards_per_worker=4)
    assert sorted(shard for shard, _ in done) == sorted(shards)
    assert (tmp_path / "die*2:y.2").exists()


def test_deaths_count_until_something_is_done(run: Run) -> None:
    """More of them than may be in a row, one after the other shard."""
    shards = [shard for i in range(4) for shard in (f"a:{i}", f"die*1:{i}")]
    done = run(shards, num_workers=1, shards_per_worker=1, max_restarts=1)
    assert [shard for shard, _ in done] == shards


def test_a_worker_that_always_dies_ends_the_run(run: Run, tmp_path: Path) -> None:
    with pytest.raises(WorkerLostError, match="died 3 times"):
        run(["die:x", "a:1"], num_workers=1, shards_per_worker=1, max_restarts=2)
    assert len(list(tmp_path.glob("die:x.*"))) == 3


def test_what_storage_says_is_told_as_it_is(run: Run) -> None:
    with pytest.raises(OSError, match=r"^\[Errno 28\] No space left on device$"):
        run(["a:1", "full:x"], num_workers=1)


def test_a_fault_of_ours_is_raised(run: Run) -> None:
    with pytest.raises(ZeroDivisionError, match="ours"):
        run(["bug:x"], num_workers=1)


def test_workers_that_find_no_room_are_not_waited_for(run: Run) -> None:
    """Ten workers of half a CPU, where six have room."""
    shards = [f"slow:{i}" for i in range(40)]
    done = run(shards, num_workers=10, shards_per_worker=1)
    assert sorted(shard for shard, _ in done) == sorted(shards)
    assert len({pid for _, pid in done}) <= 6


@pytest.mark.usefixtures("run")
def test_that_no_worker_finds_room_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Told(Exception):  # noqa: N818 - it stands for a line
        pass

    def tell(message: str, *arguments: object) -> None:
        raise Told(message % arguments)

    monkeypatch.setattr(pool, "_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(pool._LOGGER, "warning", tell)
    with pytest.raises(Told, match=r"no node has had room for a worker \(50 CPU\)"):
        list(make_pool(num_threads=50).run({"a:1": 1}))


def test_a_run_that_is_left_early_ends_its_workers(run: Run) -> None:
    reports = make_pool(num_workers=2).run({f"a:{i}": 1 for i in range(20)})
    next(reports)
    reports.close()  # type: ignore[attr-defined]
    assert run(["a:again"]) != []


def test_the_last_shards_are_issued_again_to_who_has_nothing_to_do(
    run: Run, tmp_path: Path
) -> None:
    """The first worker does nothing with a shard until the other is at it, too."""
    shards = [f"stuck:{i}" for i in range(8)]
    done = run(shards, num_workers=2, shards_per_worker=4)
    assert sorted(shard for shard, _ in done) == shards
    assert sum(tries_of(tmp_path, shard) for shard in shards) == 12


def test_a_shard_with_a_deadly_row_is_not_issued_again(run: Run, tmp_path: Path) -> None:
    """Its backup says no, and is not asked again."""
    shards = [f"slow:{i}" for i in range(20)] + ["fragile:x"]
    done = run(shards, num_workers=2, shards_per_worker=4)
    assert sorted(shard for shard, _ in done) == sorted(shards)
    assert tries_of(tmp_path, "fragile:x") <= 2


def test_retried_shards_are_not_issued_again(run: Run, tmp_path: Path) -> None:
    shards = [f"slow:{i}" for i in range(20)]
    run(shards, settings=Settings(retry=True), num_workers=2, shards_per_worker=8)
    assert [shard for shard in shards if tries_of(tmp_path, shard) > 1] == []


def test_a_pool_grows_as_long_as_shards_wait(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    add = WorkerPool._add
    monkeypatch.setattr(WorkerPool, "_add", lambda self, n: (started.append(n), add(self, n)))
    grows = [{"min_workers": 1, "num_workers": 4}]
    done = run([f"slow:{i}" for i in range(300)], workers=grows, shards_per_worker=2)
    assert len(done) == 300
    assert len(started) == 4
    assert len({pid for _, pid in done}) > 1


def test_a_pool_does_not_grow_for_few_shards(run: Run) -> None:
    grows = [{"min_workers": 1, "num_workers": 4}]
    done = run([f"a:{i}" for i in range(3)], workers=grows, shards_per_worker=4)
    assert len({pid for _, pid in done}) == 1


def test_workers_that_are_not_needed_any_more_are_let_go(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_IDLE_SECONDS", 0.3)
    monkeypatch.setattr(pool, "_TICK_SECONDS", 0.1)
    monkeypatch.setattr(WorkerPool, "_back_up", lambda *_: set())
    workers = make_pool(workers=[{"min_workers": 1, "num_workers": 3}], shards_per_worker=1)
    sizes = []
    for _ in workers.run({f"slow:{i}": 1 for i in range(200)}):
        sizes.append(len(workers.places))
    assert max(sizes) > 1
    assert 1 <= len(workers.places) <= max(sizes)


def test_unequal_workers_share_the_work(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that pretend to be NPUs are slow, and answer one of the three prompts otherwise."""
    kinds = [{"device": "npu", "resources": {}}, {"device": "cpu", "num_workers": 2}]
    pools = make_pool(workers=kinds, shards_per_worker=2)
    made_up = [Kind(kind.config.model_copy(update={"device": "cpu"}), 1) for kind in pools.kinds]
    assert [kind.needs for kind in pools.kinds] == [{"CPU": 0.5, "NPU": 1.0}, {"CPU": 0.5}]
    assert [kind.needs for kind in made_up] == [{"CPU": 0.5}] * 2


def test_kinds_that_answer_otherwise_are_told(caplog: pytest.LogCaptureFixture) -> None:
    agreement = Probe(["cuda", "cpu", "cpu"])
    assert [agreement.wants(n) for n in (0, 1, 0, 2)] == [True, True, False, True]
    agreement.hear(0, {"a": [1, 2], "b": [3], "c": [5]})
    agreement.hear(1, {"a": [1, 2], "b": [3], "c": [4]})
    assert caplog.text == ""
    agreement.hear(2, {"a": [1, 2], "b": [3], "c": [4]})
    assert "cuda and cpu and cpu workers give the same tokens for 2 of 3 prompts" in caplog.text


def test_kinds_that_answer_alike_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    agreement = Probe(["cuda", "cpu"])
    for number in (0, 1):
        agreement.hear(number, {"a": [1, 2], "b": [3]})
    assert "cuda and cpu workers give the same tokens for 2 prompts" in caplog.text


def test_one_kind_is_not_asked() -> None:
    assert not Probe(["cpu"]).wants(0)


def test_workers_say_how_they_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(pool, "_TICK_SECONDS", 0.1)
    workers = make_pool(shards_per_worker=1)
    list(workers.run({f"slow:{i}": 1 for i in range(4)}))
    (place,) = workers.places
    assert place.state is not None
    assert place.state.counts == {"num_tokens": 7}
    assert place.num_done == 4


def test_a_shard_whose_first_worker_dies_after_its_backup_is_not_done_again(
    run: Run, tmp_path: Path
) -> None:
    """The first worker waits until the other has been at each of its shards, and dies."""
    shards = [f"doomed:{i}" for i in range(4)]
    done = run(shards, num_workers=2, shards_per_worker=2)
    assert sorted(shard for shard, _ in done) == shards
    assert max(tries_of(tmp_path, shard) for shard in shards) <= 2


def test_a_shard_whose_backup_declines_after_the_first_worker_died_is_done(run: Run) -> None:
    shards = ["meet:0", "meet:1", "declined:0"]
    done = run(shards, num_workers=2, shards_per_worker=1)
    assert sorted(shard for shard, _ in done) == sorted(shards)
