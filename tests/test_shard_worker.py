"""A worker's shards: tries, rows that kill it, retries; with engines that need no model."""

import asyncio
import json
import os
import threading
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipeline import failpoints, persistence, shard_worker
from pipeline.admission import Admission, load_tokenizer
from pipeline.failed_rows import errors_uri
from pipeline.parts import Provenance, part_uri
from pipeline.plan import Plan
from pipeline.schema import schema_to_json
from pipeline.shard_task import GenerateSettings
from pipeline.shard_worker import ShardWorker
from quant.config import QuantConfig
from tests.outputs import answer, commit, fail, make_output
from workers.actor import WorkerSettings
from workers.config import EngineConfig, SamplingParams
from workers.request import Completion, Request
from workers.step_times import StepTimes

ROWS = [{"id": f"r{i}", "prompt": f"p{i}"} for i in range(40)]
ROWS[7] |= {"sampling_params": {"n": 3}}
ROWS[9] = {"id": "r9"}  # No prompt.


class Engine:
    """Answers a request a step. At the row called `deadly` it is stuck, which stands for a death."""

    step_times = StepTimes((1, 4), (0.01, 0.02345678))

    def __init__(self, deadly: str = "") -> None:
        self.deadly, self.stuck = deadly, threading.Event()
        self.waiting: list[Request] = []
        self.answered: list[str] = []
        self.company: list[set[str]] = []  # Of each request: the rows it found waiting with it.

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    def add(self, requests: Iterable[Request]) -> None:
        self.waiting += requests
        self.company.append({request.id for request in self.waiting})

    def step(self) -> list[Completion]:
        if any(request.id == self.deadly for request in self.waiting):
            self.stuck.set()
            threading.Event().wait()  # The thread is a daemon.
        request = self.waiting.pop()
        self.answered.append(request.id)
        return [answer(request)]


@pytest.fixture(scope="module")
def admission(tiny_checkpoint: Path) -> Admission:
    tokenizer = load_tokenizer(tiny_checkpoint)
    return Admission(tokenizer, SamplingParams(), 40, len(tokenizer))


@pytest.fixture
def planned(admission: Admission, tmp_path: Path) -> tuple[Path, Plan]:
    """An output whose parts are yet to be made: shards of 8, 16 and 16 rows."""
    _, plan = make_output(admission, tmp_path / "out", ROWS, rows_per_shard=16)
    for shard in plan.shards:
        Path(part_uri(str(tmp_path / "out"), shard.name)).unlink()
    return tmp_path / "out", plan


def settings_for(output: Path, plan: Plan, **changed: Any) -> GenerateSettings:
    given: dict[str, Any] = {
        "output": str(output),
        "run": "run",
        "retry": False,
        "sampling": SamplingParams(),
        "seed": 0,
        "max_attempts_per_row": 3,
        "provenance": Provenance("m", "w", "c", {}),
        "carried": schema_to_json(plan.carried),
        "worker": WorkerSettings(EngineConfig(), QuantConfig(), 40, "{}", 1),
    }
    return GenerateSettings(**given | changed)


def run_worker(
    engine: Engine, settings: GenerateSettings, shards: list[str]
) -> list[dict[str, Any]] | None:
    """A worker's life: the reports of its shards, asked for at once; None if it died."""

    async def main() -> list[dict[str, Any]] | None:
        worker = ShardWorker([None], settings)  # type: ignore[list-item]
        tasks = [asyncio.create_task(worker.run(shard)) for shard in shards]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.01)
            if engine.stuck.is_set():
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                return None
        return [asdict(task.result()) for task in tasks]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_worker, "start_engine", lambda *_: engine)
        return asyncio.run(asyncio.wait_for(main(), 60))


def rows_of(output: Path, shard: str) -> dict[tuple[str, int], dict[str, Any]]:
    rows = pq.read_table(part_uri(str(output), shard)).to_pylist()
    return {(row["id"], row["sample_idx"]): row for row in rows}


def test_a_part_names_its_worker_and_carries_its_step_times(planned: tuple[Path, Plan]) -> None:
    output, plan = planned
    assert run_worker(Engine(), settings_for(output, plan), ["00000-00000"]) is not None
    metadata = pq.read_metadata(part_uri(str(output), "00000-00000")).metadata
    footer = json.loads(metadata[b"quasar"])
    assert footer["worker"] == f"cpu:{os.uname().nodename}:{os.getpid()}"
    assert footer["max_num_seqs"] == 16
    assert footer["step_times"] == [[1, 0.01], [4, 0.02346]]  # Four digits.


def test_shards_side_by_side(planned: tuple[Path, Plan]) -> None:
    output, plan = planned
    reports = run_worker(Engine(), settings_for(output, plan), [s.name for s in plan.shards])
    assert reports is not None
    assert [r["num_rows"] for r in reports] == [8, 16, 16]
    assert [r["num_samples"] for r in reports] == [10, 16, 16]
    assert [r["num_errors"] for r in reports] == [0, 1, 0]
    attempts = json.loads((output / "attempts" / "00000-00000.json").read_bytes())
    assert (attempts["attempt"], attempts["running"], attempts["deaths"]) == (1, [], [])


@pytest.mark.parametrize("deadly", ["r7", "r30"])
def test_a_row_that_kills_is_found_and_the_rest_is_answered(
    planned: tuple[Path, Plan], deadly: str
) -> None:
    output, plan = planned
    names = [shard.name for shard in plan.shards]
    num_deaths = 0
    while run_worker(Engine(deadly), settings_for(output, plan), names) is None:
        num_deaths += 1
        assert num_deaths < 10
    assert num_deaths == 3
    rows = {key: row for name in names for key, row in rows_of(output, name).items()}
    assert len(rows) == 42
    dead = {key: row for key, row in rows.items() if row["error_type"] == "WorkerDied"}
    assert dead.keys() == {(deadly, i) for i in range(3 if deadly == "r7" else 1)}
    for row in dead.values():
        assert "died with this row under way, 3 times" in row["error"]
        assert row["seed"] is not None
    answered = {key[0] for key, row in rows.items() if row["error"] is None}
    assert answered == {row["id"] for row in ROWS} - {deadly, "r9"}
    shard = names[0] if deadly == "r7" else names[2]
    errors = pq.read_table(errors_uri(str(output), shard)).to_pylist()
    assert {row["id"] for row in errors} == {deadly}
    assert errors[0]["prompt"] == f"p{deadly[1:]}"


def test_suspects_have_the_engine_alone(planned: tuple[Path, Plan]) -> None:
    output, plan = planned
    names = [shard.name for shard in plan.shards]
    assert run_worker(Engine("r30"), settings_for(output, plan), names) is None
    engine = Engine()
    assert run_worker(engine, settings_for(output, plan), names) is not None
    of_shard = {row["id"]: (0 if i < 8 else 1 if i < 24 else 2) for i, row in enumerate(ROWS)}
    company = [{of_shard[row] for row in rows} for rows in engine.company if rows]
    assert sorted(company, key=min) == [{0}, {1}, {2}]


def test_the_end_of_a_run_makes_no_suspects(planned: tuple[Path, Plan]) -> None:
    output, plan = planned
    for number in range(3):
        settings = settings_for(output, plan, run=str(number))
        assert run_worker(Engine("r1"), settings, ["00000-00000"]) is None
    engine = Engine()
    assert run_worker(engine, settings_for(output, plan, run="last"), ["00000-00000"]) is not None
    assert len(engine.company) == 1
    assert {row["attempt"] for row in rows_of(output, "00000-00000").values()} == {4}


def test_a_retry_answers_what_failed_and_nothing_else(
    planned: tuple[Path, Plan], admission: Admission
) -> None:
    output, plan = planned
    from pipeline.inspection import read_config

    config = read_config(str(output))
    assert config is not None
    name = plan.shards[0].name
    commit(output, plan, name, config, lambda r: (fail if r.id in ("r2", "r7") else answer)(r))
    before = rows_of(output, name)
    engine = Engine()
    assert run_worker(engine, settings_for(output, plan, retry=True), [name]) is not None
    assert sorted(engine.answered) == ["r2", "r7", "r7", "r7"]
    after = rows_of(output, name)
    assert list(after) == list(before)
    assert [key for key, row in after.items() if row["error"]] == []
    untouched = {key: row for key, row in before.items() if key[0] not in ("r2", "r7")}
    assert {key: after[key] for key in untouched} == untouched
    assert not Path(errors_uri(str(output), name)).exists()


def test_a_retry_of_a_run_that_is_not_complete(planned: tuple[Path, Plan]) -> None:
    output, plan = planned
    engine = Engine()
    assert run_worker(engine, settings_for(output, plan, retry=True), ["00000-00000"]) is not None
    assert len(rows_of(output, "00000-00000")) == 10


def test_a_retry_gives_a_condemned_row_another_chance(planned: tuple[Path, Plan]) -> None:
    output, plan = planned
    name = plan.shards[0].name
    while run_worker(Engine("r1"), settings_for(output, plan), [name]) is None:
        pass
    assert rows_of(output, name)["r1", 0]["error_type"] == "WorkerDied"
    engine = Engine()
    assert (
        run_worker(engine, settings_for(output, plan, retry=True, run="again"), [name]) is not None
    )
    assert engine.answered == ["r1"]
    assert rows_of(output, name)["r1", 0]["error"] is None


@pytest.mark.parametrize(("failing", "is_told"), [("storage%3:5", False), ("aside%1:28", True)])
def test_storage_that_fails(
    planned: tuple[Path, Plan], monkeypatch: pytest.MonkeyPatch, failing: str, is_told: bool
) -> None:
    """Every third call with an I/O error: nobody notices. No space on the device: that is told."""
    output, plan = planned
    monkeypatch.setenv(failpoints.VARIABLE, failing)
    monkeypatch.setattr(persistence, "_PAUSES", (0.0, 0.0))
    told: list[str] = []

    async def main() -> None:
        worker = ShardWorker([None], settings_for(output, plan))  # type: ignore[list-item]
        for shard in plan.shards:
            try:
                await worker.run(shard.name)
            except OSError as error:
                told.append(str(error))

    monkeypatch.setattr(shard_worker, "start_engine", lambda *_: Engine())
    asyncio.run(asyncio.wait_for(main(), 60))
    if is_told:
        assert len(told) == 3
        assert all("No space left on device" in error for error in told)
        assert list((output / "data").iterdir()) == []
    else:
        assert told == []
        monkeypatch.delenv(failpoints.VARIABLE)
        assert sum(len(rows_of(output, shard.name)) for shard in plan.shards) == 42


def test_an_engine_that_starts_at_the_third_try(
    planned: tuple[Path, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    output, plan = planned
    monkeypatch.setattr(shard_worker, "_PAUSE_SECONDS", 0.0)
    tries: list[int] = []

    class Reluctant(Engine):
        def __init__(self) -> None:
            super().__init__()
            tries.append(1)
            if len(tries) < 3:
                raise OSError("a device that is busy")

    async def main() -> None:
        worker = ShardWorker([None], settings_for(output, plan))  # type: ignore[list-item]
        await worker.run("00000-00000")

    monkeypatch.setattr(shard_worker, "start_engine", lambda *_: Reluctant())
    asyncio.run(asyncio.wait_for(main(), 60))
    assert len(tries) == 3
    monkeypatch.setattr(shard_worker, "start_engine", lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match="the engine failed") as raised:
        asyncio.run(asyncio.wait_for(main(), 60))
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def run_backup(output: Path, plan: Plan, shard: str, **changed: Any) -> Any:
    async def main() -> Any:
        worker = ShardWorker([None], settings_for(output, plan, **changed))  # type: ignore[list-item]
        return await worker.run(shard, is_backup=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_worker, "start_engine", lambda *_: Engine())
        return asyncio.run(asyncio.wait_for(main(), 60))


@pytest.fixture
def under_way(planned: tuple[Path, Plan]) -> tuple[Path, Plan, bytes]:
    """A worker is at the first shard, and waits; what it wrote of its try."""
    output, plan = planned
    assert run_worker(Engine("r3"), settings_for(output, plan), ["00000-00000"]) is None
    return output, plan, (output / "attempts" / "00000-00000.json").read_bytes()


def test_a_backup_leaves_no_trace_of_its_try(under_way: tuple[Path, Plan, bytes]) -> None:
    output, plan, written = under_way
    report = run_backup(output, plan, "00000-00000")
    assert report.num_samples == 10
    assert {row["attempt"] for row in rows_of(output, "00000-00000").values()} == {1}
    assert (output / "attempts" / "00000-00000.json").read_bytes() == written


def test_who_comes_second_leaves_the_part_as_it_is(under_way: tuple[Path, Plan, bytes]) -> None:
    output, plan, _ = under_way
    first = run_backup(output, plan, "00000-00000")
    content = Path(part_uri(str(output), "00000-00000")).read_bytes()
    (second,) = run_worker(Engine(), settings_for(output, plan, run="other"), ["00000-00000"]) or []
    assert second == asdict(first)
    assert Path(part_uri(str(output), "00000-00000")).read_bytes() == content


def test_a_part_that_is_damaged_does_not_stay(under_way: tuple[Path, Plan, bytes]) -> None:
    output, plan, _ = under_way
    Path(part_uri(str(output), "00000-00000")).write_bytes(b"PAR1")
    assert run_backup(output, plan, "00000-00000").num_samples == 10
    assert len(rows_of(output, "00000-00000")) == 10


def test_a_shard_whose_rows_may_be_deadly_is_not_backed_up(
    under_way: tuple[Path, Plan, bytes],
) -> None:
    """A second try, after the death of the first: it writes down that a worker died."""
    output, plan, _ = under_way
    assert run_worker(Engine("r3"), settings_for(output, plan), ["00000-00000"]) is None
    assert run_backup(output, plan, "00000-00000") is None
    assert not Path(part_uri(str(output), "00000-00000")).exists()


def test_three_prompts_are_answered_greedily(planned: tuple[Path, Plan]) -> None:
    """The first three that can run."""
    output, plan = planned
    engine = Engine()
    seen: list[Request] = []

    async def main() -> dict[str, list[int]]:
        worker = ShardWorker([None], settings_for(output, plan))  # type: ignore[list-item]
        return await worker.probe("00000-00001")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_worker, "start_engine", lambda *_: engine)
        patch.setattr(engine, "add", lambda r: (seen.extend(r), engine.waiting.extend(r)))
        answers = asyncio.run(asyncio.wait_for(main(), 60))
    assert sorted(answers) == ["r10", "r11", "r8"]
    assert {(r.params.temperature, r.params.max_tokens) for r in seen} == {(0.0, 32)}
