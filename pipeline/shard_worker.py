"""A stateful worker: one engine, several shards at once, parts committed as they finish."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pipeline import failpoints
from pipeline.attempts import Attempts
from pipeline.duplicates import Duplicates, find_answers
from pipeline.errors import DamagedPartError
from pipeline.floor import Floor
from pipeline.metrics import WorkerMetrics
from pipeline.parts import (
    PartReport,
    Provenance,
    answer_row,
    commit_part,
    dead_rows,
    find_part,
    read_part,
    refused_row,
    shared_row,
)
from pipeline.probe import NUM_PROMPTS, probe_params
from pipeline.requests import build_requests
from pipeline.schema import OUTPUT_SCHEMA, PLAN_SCHEMA, output_schema, schema_from_json
from pipeline.shard_task import GenerateSettings, ShardTask
from pipeline.shards import read_shard
from quant.errors import CheckpointError
from quant.store import WeightsRef
from workers.actor import Worker, start_engine
from workers.engine import Engine
from workers.request import Completion, Request
from workers.step_times import StepTimes

_LOGGER = logging.getLogger(__name__)
_STARTS, _PAUSE_SECONDS = 3, 2.0


@dataclass(frozen=True)
class WorkerState:
    """How a worker is doing: its name (`device:host:pid`), and its engine's counts (`workers.tally`)."""

    name: str
    counts: dict[str, int]


class ShardWorker:
    """Answers shards by their names: an actor of `pipeline.pool`."""

    def __init__(self, weights: Sequence[WeightsRef], settings: GenerateSettings) -> None:
        """Start building the engine; returns at once."""
        # The engine's thread waits for the weights, and Ray warns as if the event loop did.
        logging.getLogger("ray").setLevel(logging.ERROR)
        self._settings = settings
        self._weights = weights
        self._step_times: StepTimes | None = None  # Known once the engine is built.
        self._worker = Worker(_starting(self._start), settings.worker.device)
        self._schema = output_schema(schema_from_json(settings.carried))
        self._turn = asyncio.Lock()
        self._floor = Floor()
        self._ended: dict[str, asyncio.Event] = {}
        self._metrics: WorkerMetrics | None = None

    def _start(self) -> Engine:
        engine = start_engine(self._weights[0], self._settings.worker)
        self._step_times = engine.step_times
        return engine

    def _provenance(self) -> Provenance:
        return replace(
            self._settings.provenance,
            worker=self._worker.name,
            max_num_seqs=self._settings.worker.engine.max_num_seqs,
            step_times=self._step_times,
        )

    async def run(self, shard: str, *, is_backup: bool = False) -> PartReport | None:
        """Answer every row of a shard and commit its part; raises OSError if storage fails for good.

        If another worker was faster, its part stays. A backup, which is tried while another worker is at
        the shard, gives None, and nothing is done, where rows of the shard may be deadly.
        """
        with self._under_way(shard):
            return await self._answer_shard(shard, is_backup=is_backup)

    async def state(self) -> WorkerState:
        """How this worker is doing; Ray's metrics are told as well."""
        if self._metrics is None:
            self._metrics = WorkerMetrics(self._worker.name)
        self._metrics.publish(self._worker.tally)
        return WorkerState(self._worker.name, self._worker.tally.to_dict())

    async def probe(self, shard: str) -> dict[str, list[int]]:
        """Greedy answers, of a few tokens, to the first rows of a shard that can run, by their ids."""
        rows = (await asyncio.to_thread(read_shard, self._settings.output, shard)).to_pylist()
        rows = [row for row in rows if row["error"] is None][:NUM_PROMPTS]
        requests = [request for row in rows for request in self._requests(row)[:1]]
        short = [
            replace(request, params=probe_params(request.params.max_tokens)) for request in requests
        ]
        answers = [answer async for answer in self._worker.submit(short)]
        return {answer.request.id: list(answer.token_ids) for answer in answers}

    async def _answer_shard(self, shard: str, *, is_backup: bool) -> PartReport | None:
        settings = self._settings
        async with self._turn:  # Shards enter the engine's queue in the order they came.
            task = await asyncio.to_thread(self._open, shard, is_backup=is_backup)
            if task is None:
                return None
            begun = await self._begin(task)
        await self._finish(task, *begun)
        if task.duplicates.elsewhere:
            await self._look_elsewhere(task)
            await self._finish(task, *await self._begin(task))  # What was not found.
        task.share()
        await asyncio.to_thread(task.attempts.start, [])
        task.answered.sort(key=lambda item: (item[0], item[1]["sample_idx"]))
        if not settings.retry:
            find = partial(find_part, settings.output, shard, len(task.rows))
            if (placed := await asyncio.to_thread(find)) is not None:
                return placed
        return await asyncio.to_thread(
            commit_part,
            settings.output,
            shard,
            task.answered,
            task.plan,
            self._schema,
            self._provenance(),
            is_first=task.attempts.number == 1 and not settings.retry and not is_backup,
        )

    async def _begin(self, task: ShardTask) -> tuple[AsyncIterator[Completion], list[list[int]]]:
        """Give the engine the rows that nothing is known against; they, and groups of the others."""
        trusted, *groups = task.attempts.groups(task.todo())
        await asyncio.to_thread(task.attempts.start, trusted)
        await self._floor.enter()
        return self._submit(task, trusted), groups

    async def _finish(
        self, task: ShardTask, completions: AsyncIterator[Completion], groups: list[list[int]]
    ) -> None:
        """Take in what was begun, then try the groups, one at a time."""
        try:
            await self._collect(task, completions)
        finally:
            await self._floor.leave()
        for group in groups:
            async with self._floor.alone():
                await asyncio.to_thread(task.attempts.start, group)
                await self._collect(task, self._submit(task, group))

    async def _look_elsewhere(self, task: ShardTask) -> None:
        """Take answers over from other shards' parts, as far as they are there.

        Those that this worker is making are waited for. They come earlier in the plan, so that no two
        wait for each other.
        """
        left = set(task.unanswered())
        for shard, rows in task.duplicates.elsewhere.items():
            wanted = {row: index for row, index in rows.items() if index in left}
            if not wanted:
                continue
            if (ended := self._ended.get(shard)) is not None:
                await ended.wait()
            find = partial(find_answers, self._settings.output, shard, wanted.keys())
            found = await asyncio.to_thread(find, failed=not self._settings.retry)
            for row, answers in found.items():
                index = wanted[row]
                task.answered.extend((index, shared_row(a, task.rows[index])) for a in answers)
        task.duplicates.elsewhere.clear()

    @contextmanager
    def _under_way(self, shard: str) -> Iterator[None]:
        """Let others know when a shard's part is in place, or will not be."""
        self._ended[shard] = asyncio.Event()
        try:
            yield
        finally:
            self._ended.pop(shard).set()

    def _open(self, shard: str, *, is_backup: bool) -> ShardTask | None:
        """Read a shard, count the try, and take over what is answered already; None if it is given up."""
        settings = self._settings
        where = settings.output, shard, settings.run
        if is_backup:
            attempts = Attempts.beside(*where)
        else:
            attempts = Attempts.begin(*where, forgive=settings.retry)
        if attempts is None:
            return None
        plan = read_shard(settings.output, shard)
        rows = plan.select(PLAN_SCHEMA.names).to_pylist()
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
        duplicates = Duplicates.of_rows(rows)
        task = ShardTask(shard, plan, rows, attempts, answered, common, duplicates)
        for i in attempts.condemned(task.unanswered(), settings.max_attempts_per_row):
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

    def _submit(self, task: ShardTask, group: Sequence[int]) -> AsyncIterator[Completion]:
        for index in group:
            failpoints.reach("row", task.rows[index]["id"])
        return self._worker.submit([r for index in group for r in self._requests(task.rows[index])])

    async def _collect(self, task: ShardTask, completions: AsyncIterator[Completion]) -> None:
        index_of = {row["id"]: index for index, row in enumerate(task.rows)}
        async for completion in completions:
            index = index_of[completion.request.id]
            task.answered.append((index, answer_row(completion, task.rows[index], task.common)))


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
