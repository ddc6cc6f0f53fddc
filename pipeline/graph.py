"""The Ray Data graphs: sources to plan shards, and plan shards to committed parts.

What travels between processes is small: names of shards and what became of them. Rows go from file to
file.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, DataContext, Dataset

from pipeline.admission import Admission
from pipeline.config import RunConfig
from pipeline.errors import InputError
from pipeline.parts import (
    PartReport,
    Provenance,
    answer_row,
    commit_part,
    next_attempt,
    refused_row,
)
from pipeline.plan import Plan, assemble, group_sources, name_sources
from pipeline.requests import build_requests
from pipeline.schema import PLAN_SCHEMA, output_schema, schema_from_json
from pipeline.shards import Shard, SourceGroup, read_shard, write_groups
from quant.store import WeightsRef
from workers.actor import Worker, WorkerSettings, start_engine, worker_environment
from workers.config import SamplingParams
from workers.stats import AcceptanceStats


@dataclass(frozen=True)
class GenerateSettings:
    """What an actor needs to know beside its weights."""

    output: str
    sampling: SamplingParams
    seed: int
    provenance: Provenance
    carried: str
    worker: WorkerSettings


def write_plan(
    config: RunConfig, uris: Sequence[str], admission: Admission, origin: dict[str, str]
) -> Plan:
    """Read the sources with Ray Data, write all prompt shards, and check them as a whole.

    What is planned already stays as it is; sources that came since are added.

    Raises:
        InputError: a source is unusable, or the plan was made for something else.
    """
    known = Plan.load(config.output)
    if known is not None:
        known.check_origin(origin)
    sources = name_sources(uris, known.sources if known else ())
    groups = group_sources(sources, config.data.limit, known)
    if known is not None and not groups:
        return known
    plan = assemble(_write_shards(groups, config, admission), config.output, sources, origin, known)
    plan.save(config.output)
    return plan


def _write_shards(
    groups: Sequence[SourceGroup], config: RunConfig, admission: Admission
) -> Iterator[tuple[Shard, pa.Schema]]:
    _quiet()
    dataset = ray.data.from_items(
        [{"group": group.to_json()} for group in groups], override_num_blocks=len(groups)
    )
    write: Callable[..., dict[str, list[str]]] = write_groups  # Ray's types know one argument only.
    written = dataset.map_batches(
        write,
        fn_kwargs={
            "admission": admission,
            "output": config.output,
            "rows_per_shard": config.data.rows_per_shard,
        },
        batch_size=1,
        num_cpus=0.5,
    )
    for row in _rows(written):
        if row["error"]:
            raise InputError(row["error"])
        yield Shard(**json.loads(row["shard"])), schema_from_json(row["schema"])


def run_shards(
    shards: list[str], weights: WeightsRef, settings: GenerateSettings, config: RunConfig
) -> Iterator[PartReport]:
    """Generate and commit shards on an actor pool; yields a report per committed shard.

    `weights` must stay alive until the iterator is exhausted.
    """
    _quiet()
    cluster, threads = config.cluster, settings.worker.num_threads
    dataset = ray.data.from_items(
        [{"shard": shard} for shard in shards], override_num_blocks=len(shards)
    )
    committed = dataset.map_batches(
        _ShardActor,
        fn_constructor_args=([weights], settings),
        batch_size=1,
        compute=ActorPoolStrategy(
            size=min(cluster.num_workers, len(shards)),
            max_tasks_in_flight_per_actor=cluster.shards_per_worker,
            max_concurrent_calls_per_actor=cluster.shards_per_worker,
        ),
        # Half a CPU is left to the conversion task, should its pieces have to be made again.
        num_cpus=threads - 0.5,
        num_gpus=1 if cluster.device == "cuda" else None,
        runtime_env={"env_vars": worker_environment(threads)},
    )
    for row in _rows(committed):
        stats = AcceptanceStats(**row["report"].pop("stats"))
        yield PartReport(**row["report"], stats=stats)


def _rows(dataset: Dataset) -> Iterator[dict[str, Any]]:
    """Rows as their blocks come; by itself Ray Data holds each block back until the next is there."""
    tables: Iterable[Any] = dataset.iter_batches(
        batch_size=None, batch_format="pyarrow", prefetch_batches=0
    )
    for table in tables:
        yield from table.to_pylist()


class _ShardActor:
    """A stateful actor: one engine, several shards at once, parts committed as they finish."""

    def __init__(self, weights: list[WeightsRef], settings: GenerateSettings) -> None:
        self._settings = settings
        self._worker = Worker(
            lambda: start_engine(weights[0], settings.worker), settings.worker.device
        )
        self._schema = output_schema(schema_from_json(settings.carried))
        self._turn = asyncio.Lock()

    async def __call__(self, batch: dict[str, np.ndarray]) -> AsyncIterator[dict[str, list[Any]]]:
        for shard in batch["shard"]:
            report = await self._run_shard(str(shard))
            yield {"report": [asdict(report)]}

    async def _run_shard(self, shard: str) -> PartReport:
        """Answer every row of a shard and commit its part."""
        settings = self._settings
        async with self._turn:  # Shards enter the engine's queue in the order they came.
            plan = await asyncio.to_thread(read_shard, settings.output, shard)
            attempt = await asyncio.to_thread(next_attempt, settings.output, shard)
            rows = plan.select(PLAN_SCHEMA.names).to_pylist()
            admitted = [(i, row) for i, row in enumerate(rows) if row["error"] is None]
            index_of = {row["id"]: i for i, row in admitted}
            completions = self._worker.submit(
                [
                    request
                    for _, row in admitted
                    for request in build_requests(row, settings.sampling, settings.seed)
                ]
            )
        common = self._common_columns(attempt)
        answered = [
            (i, refused_row(row, common)) for i, row in enumerate(rows) if row["error"] is not None
        ]
        async for completion in completions:
            i = index_of[completion.request.id]
            answered.append((i, answer_row(completion, rows[i], common)))
        answered.sort(key=lambda item: (item[0], item[1]["sample_idx"]))
        return await asyncio.to_thread(
            commit_part, settings.output, shard, answered, plan, self._schema, settings.provenance
        )

    def _common_columns(self, attempt: int) -> dict[str, Any]:
        return {
            "attempt": attempt,
            "model": self._settings.provenance.model,
            "device": self._worker.device,
            "num_spec_tokens": self._settings.worker.engine.num_spec_tokens,
        }


def _quiet() -> None:
    """Progress is ours to show: no bars, no banner of every execution, no error told twice."""
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
