"""A stateful worker: one engine, several shards at once, parts committed as they finish."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline import failpoints
from pipeline.attempts import Attempts
from pipeline.errors import DamagedPartError
from pipeline.parts import (
    PartReport,
    Provenance,
    answer_row,
    commit_part,
    dead_rows,
    read_part,
    refused_row,
)
from pipeline.requests import build_requests
from pipeline.schema import OUTPUT_SCHEMA, PLAN_SCHEMA, output_schema, schema_from_json
from pipeline.shards import read_shard
from quant.errors import CheckpointError
from quant.store import WeightsRef
from workers.actor import Worker, WorkerSettings, start_engine
from workers.config import SamplingParams
from workers.engine import Engine
from workers.request import Completion, Request

_LOGGER = logging.getLogger(__name__)
_STARTS, _PAUSE_SECONDS = 3, 2.0


@dataclass(frozen=True)
class GenerateSettings:
    """What a worker needs to know beside its weights.

    `run` names the run, `retry` says that shards have parts whose failed rows are to be tried again.
    """

    output: str
    run: str
    retry: bool
    sampling: SamplingParams
    seed: int
    max_attempts_per_row: int
    provenance: Provenance
    carried: str
    worker: WorkerSettings


@dataclass(frozen=True)
class _Task:
    """A shard in work: its rows, and what is known of its tries and its answers."""

    shard: str
    plan: pa.Table
    rows: list[dict[str, Any]]
    attempts: Attempts
    answered: list[tuple[int, dict[str, Any]]]
    common: dict[str, Any]

    def todo(self) -> list[int]:
        """The rows without an answer."""
        done = {index for index, _ in self.answered}
        return [index for index in range(len(self.rows)) if index not in done]


class ShardWorker:
    """Answers shards by their names: a callable for Ray Data's actor pool."""

    def __init__(self, weights: Sequence[WeightsRef], settings: GenerateSettings) -> None:
        """Start building the engine; returns at once."""
        self._settings = settings
        build = _starting(lambda: start_engine(weights[0], settings.worker))
        self._worker = Worker(build, settings.worker.device)
        self._schema = output_schema(schema_from_json(settings.carried))
        self._turn = asyncio.Lock()
        self._floor = _Floor()

    async def __call__(self, batch: dict[str, np.ndarray]) -> AsyncIterator[dict[str, list[Any]]]:
        """Yield a report (JSON) for each shard named in the column `shard`, once its part is in place.

        Storage that fails for good is a value, `error`, as Ray would bury its exception.
        """
        for shard in batch["shard"]:
            try:
                report = await self._run_shard(str(shard))
            except OSError as error:
                yield {"report": [""], "error": [str(error)]}
            else:
                yield {"report": [json.dumps(asdict(report))], "error": [""]}

    async def _run_shard(self, shard: str) -> PartReport:
        """Answer every row of a shard and commit its part."""
        async with self._turn:  # Shards enter the engine's queue in the order they came.
            task = await asyncio.to_thread(self._open, shard)
            trusted, *groups = task.attempts.groups(task.todo())
            await asyncio.to_thread(task.attempts.start, trusted)
            await self._floor.enter()
            completions = self._submit(task, trusted)
        try:
            await self._collect(task, completions)
        finally:
            await self._floor.leave()
        for group in groups:
            async with self._floor.alone():
                await asyncio.to_thread(task.attempts.start, group)
                await self._collect(task, self._submit(task, group))
        await asyncio.to_thread(task.attempts.start, [])
        task.answered.sort(key=lambda item: (item[0], item[1]["sample_idx"]))
        settings = self._settings
        return await asyncio.to_thread(
            commit_part,
            settings.output,
            shard,
            task.answered,
            task.plan,
            self._schema,
            settings.provenance,
        )

    def _open(self, shard: str) -> _Task:
        """Read a shard, count the try, and take over what is answered already."""
        settings = self._settings
        plan = read_shard(settings.output, shard)
        rows = plan.select(PLAN_SCHEMA.names).to_pylist()
        attempts = Attempts.begin(settings.output, shard, settings.run, forgive=settings.retry)
        common = {
            "attempt": attempts.number,
            "model": settings.provenance.model,
            "device": self._worker.device,
            "num_spec_tokens": settings.worker.engine.num_spec_tokens,
        }
        answered = self._kept(shard, rows) if settings.retry else []
        kept = {index for index, _ in answered}
        for index, row in enumerate(rows):
            if row["error"] is not None and index not in kept:
                answered.append((index, refused_row(row, common)))
        task = _Task(shard, plan, rows, attempts, answered, common)
        for i in attempts.condemned(task.todo(), settings.max_attempts_per_row):
            dead = dead_rows(self._requests(rows[i]), attempts.deaths[i], rows[i], common)
            answered.extend((i, row) for row in dead)
        return task

    def _kept(self, shard: str, rows: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
        """The rows of a part all of whose samples are answered, or that were refused; if there is one."""
        try:
            table, _ = read_part(self._settings.output, shard)
        except DamagedPartError:
            return []
        index_of = {row["id"]: index for index, row in enumerate(rows)}
        part = table.select(OUTPUT_SCHEMA.names).to_pylist()
        failed = {row["id"] for row in part if row["error"] is not None}
        again = {row["id"] for row in rows if row["error"] is None and row["id"] in failed}
        return [(index_of[row["id"]], row) for row in part if row["id"] not in again]

    def _requests(self, row: dict[str, Any]) -> list[Request]:
        return build_requests(row, self._settings.sampling, self._settings.seed)

    def _submit(self, task: _Task, group: Sequence[int]) -> AsyncIterator[Completion]:
        for index in group:
            failpoints.reach("row", task.rows[index]["id"])
        return self._worker.submit([r for index in group for r in self._requests(task.rows[index])])

    async def _collect(self, task: _Task, completions: AsyncIterator[Completion]) -> None:
        index_of = {row["id"]: index for index, row in enumerate(task.rows)}
        async for completion in completions:
            index = index_of[completion.request.id]
            task.answered.append((index, answer_row(completion, task.rows[index], task.common)))


class _Floor:
    """Shards share the worker's engine, but for rows that may kill it: these have it alone."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._num_inside = 0
        self._num_waiting = 0
        self._is_closed = False

    async def enter(self) -> None:
        """Share the engine; waits while somebody has it alone, or waits for that."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_closed and not self._num_waiting)
            self._num_inside += 1

    async def leave(self) -> None:
        """Be done with what was entered for."""
        async with self._changed:
            self._num_inside -= 1
            self._changed.notify_all()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Have the engine alone."""
        async with self._changed:
            self._num_waiting += 1
            await self._changed.wait_for(lambda: not self._is_closed and not self._num_inside)
            self._num_waiting -= 1
            self._is_closed = True
        try:
            yield
        finally:
            async with self._changed:
                self._is_closed = False
                self._changed.notify_all()


def _starting(build: Callable[[], Engine]) -> Callable[[], Engine]:
    """Start an engine, more than once if need be: storage and devices fail for a moment at times."""

    def start() -> Engine:
        failpoints.reach("worker-start")
        for left in reversed(range(_STARTS)):
            try:
                return build()
            except CheckpointError:
                raise
            except Exception as error:
                if not left:
                    raise
                _LOGGER.warning("the engine did not start (%s); it is tried again", error)
                time.sleep(_PAUSE_SECONDS)
        raise AssertionError

    return start
