"""The Ray Data graphs: sources to plan shards, and plan shards to committed parts.

What travels between processes is small: names of shards and what became of them. Rows go from file to
file.
"""

import json
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, DataContext, Dataset
from ray.exceptions import ActorDiedError
from ray.util.annotations import RayDeprecationWarning

from pipeline import failpoints
from pipeline.admission import Admission
from pipeline.config import RunConfig
from pipeline.errors import InputError, InterruptedRunError, WorkerLostError
from pipeline.parts import PartReport, list_parts
from pipeline.plan import Plan, assemble, group_sources, name_sources
from pipeline.schema import schema_from_json
from pipeline.shard_worker import GenerateSettings, ShardWorker
from pipeline.shards import Shard, SourceGroup, missing_shards, write_groups
from quant.store import WeightsRef
from workers.actor import worker_environment

_LOGS = "/tmp/ray/session_latest/logs, on each node"


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
        known = _mend(known, config, admission)
    elif list_parts(config.output):
        raise InputError(
            f"output {config.output}: has parts, and the plan that they belong to (plan/plan.json) is "
            "lost; choose another folder"
        )
    sources = name_sources(uris, known.sources if known else ())
    groups = group_sources(sources, config.data.limit, known)
    origin = (known.origin if known else {}) | origin
    if known is not None and not groups:
        if known.origin != origin:
            known = replace(known, origin=origin)
            known.save(config.output)
        return known
    plan = assemble(_write_shards(groups, config, admission), config.output, sources, origin, known)
    plan.save(config.output)
    return plan


def _mend(plan: Plan, config: RunConfig, admission: Admission) -> Plan:
    """Make prompt shards that got lost again, from the sources they were made of."""
    lost = missing_shards(config.output, plan.shards)
    if not lost:
        return plan
    groups = plan.groups_of(lost, config.data.limit)
    plan = plan.with_mended(shard for shard, _ in _write_shards(groups, config, admission))
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

    Raises:
        InterruptedRunError: the output cannot be read or written any more.
        WorkerLostError: a worker's process died, and was started again as often as it may be.
    """
    _quiet()
    cluster, threads = config.cluster, settings.worker.num_threads
    dataset = ray.data.from_items(
        [{"shard": shard} for shard in shards], override_num_blocks=len(shards)
    )
    with warnings.catch_warnings():
        # Ray Data means to drop `max_restarts`, and has nothing yet in its place.
        warnings.simplefilter("ignore", RayDeprecationWarning)
        committed = dataset.map_batches(
            ShardWorker,
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
            runtime_env={"env_vars": worker_environment(threads) | _failpoint()},
            max_restarts=cluster.max_restarts,
        )
    try:
        for row in _rows(committed):
            if row["error"]:
                raise InterruptedRunError(
                    f"output {config.output}: cannot be used ({row['error']}); what is done stays, and "
                    "the same command goes on once that is mended"
                )
            yield PartReport.from_dict(json.loads(row["report"]))
    except ActorDiedError as error:
        times = cluster.max_restarts + 1
        raise WorkerLostError(
            f"a worker's process died {times} times, more than --cluster.max_restarts allows; what it "
            f"said last is in Ray's logs ({_LOGS}); what is done stays, and the same command goes on"
        ) from error


def _rows(dataset: Dataset) -> Iterator[dict[str, Any]]:
    """Rows as their blocks come; by itself Ray Data holds each block back until the next is there."""
    tables: Iterable[Any] = dataset.iter_batches(
        batch_size=None, batch_format="pyarrow", prefetch_batches=0
    )
    for table in tables:
        yield from table.to_pylist()


def _failpoint() -> dict[str, str]:
    """What a test has set here counts in the workers, too."""
    wanted = os.environ.get(failpoints.VARIABLE)
    return {failpoints.VARIABLE: wanted} if wanted else {}


def _quiet() -> None:
    """Progress is ours to show: no bars, no banner of every execution, no error told twice."""
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
