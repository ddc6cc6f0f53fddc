"""The pool of workers, with workers that need no engine: who gets which shard, and what deaths do."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import pool
from pipeline.config import ClusterConfig
from pipeline.errors import WorkerLostError
from pipeline.pool import WorkerPool

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

SETTINGS: Any = SimpleNamespace(worker=SimpleNamespace(num_threads=1))  # Half a CPU: six have room.


def stub(folder: Path) -> type:
    """A worker whose shards say what becomes of it; each try leaves a file."""
    where = str(folder)

    class Stub:  # Local, so that Ray carries it to its processes by value.
        def __init__(self, weights: Any, settings: Any) -> None:
            self._first = os.path.join(where, "first")
            try:
                os.close(os.open(self._first, os.O_CREAT | os.O_EXCL))
                self._is_first = True
            except FileExistsError:
                self._is_first = False

        async def run(self, shard: str) -> Any:
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
            await asyncio.sleep(0.5 if what == "slow" and self._is_first else 0.02)
            return f"{shard} by {os.getpid()}"

    return Stub


Run = Any


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run shards, in the order they were done: [(shard, pid)]."""
    monkeypatch.setattr(pool, "ShardWorker", stub(tmp_path))

    def go(shards: list[str], **changed: Any) -> list[tuple[str, str]]:
        workers = WorkerPool(None, SETTINGS, ClusterConfig(**changed))  # type: ignore[arg-type]
        reports: Any = list(workers.run(shards))
        return [(shard, pid) for shard, _, pid in (report.partition(" by ") for report in reports)]

    yield go
    assert actors_alive() == 0, "all actors are ended"


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
    shards = [f"a:{i}" for i in range(30)]
    done = run(shards, num_workers=2, shards_per_worker=3)
    assert sorted(shard for shard, _ in done) == sorted(shards)
    assert len({pid for _, pid in done}) == 2


def test_one_worker_keeps_the_order(run: Run) -> None:
    shards = [f"a:{i}" for i in range(10)]
    assert [shard for shard, _ in run(shards, num_workers=1, shards_per_worker=1)] == shards


def test_who_is_slower_gets_less(run: Run) -> None:
    done = run([f"slow:{i}" for i in range(30)], num_workers=2, shards_per_worker=1)
    by_worker = sorted(sum(p == pid for _, p in done) for pid in {pid for _, pid in done})
    assert by_worker[0] <= 8, by_worker
    assert sum(by_worker) == 30


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
    large: Any = SimpleNamespace(worker=SimpleNamespace(num_threads=50))
    workers = WorkerPool(None, large, ClusterConfig())  # type: ignore[arg-type]
    with pytest.raises(Told, match=r"no node has had room for a worker \(49\.5 CPUs\) for \d+ s"):
        list(workers.run(["a:1"]))


def test_a_run_that_is_left_early_ends_its_workers(run: Run) -> None:
    workers = WorkerPool(None, SETTINGS, ClusterConfig(num_workers=2))  # type: ignore[arg-type]
    reports = workers.run([f"a:{i}" for i in range(20)])
    next(reports)
    reports.close()  # type: ignore[attr-defined]
    assert run(["a:again"]) != []
