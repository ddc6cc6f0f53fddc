"""The Ray Data graph: sources to prompt shards.

What travels between processes is small: names of shards and what became of them. Rows go from file to
file.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import ray
from ray.data import DataContext, Dataset

from pipeline.admission import Admission
from pipeline.config import RunConfig
from pipeline.duplicates import point_to_firsts
from pipeline.errors import InputError
from pipeline.inspection import read_plan
from pipeline.plan import Plan, assemble, group_sources, name_sources
from pipeline.schema import schema_from_json
from pipeline.shards import Shard, SourceGroup, missing_shards, write_groups


def write_plan(
    config: RunConfig, uris: Sequence[str], admission: Admission, origin: dict[str, str]
) -> Plan:
    """Read the sources with Ray Data, write all prompt shards, and check them as a whole.

    What is planned already stays as it is; sources that came since are added.

    Raises:
        InputError: a source is unusable, or the plan was made for something else.
    """
    known = read_plan(config.output)
    if known is not None:
        known.check_origin(origin)
        known = _mend(known, config, admission)
    sources = name_sources(uris, known.sources if known else ())
    groups = group_sources(sources, config.data.limit, known)
    origin = (known.origin if known else {}) | origin
    if known is not None and not groups:
        if known.origin != origin:
            known = replace(known, origin=origin)
            known.save(config.output)
        return known
    plan = assemble(_write_shards(groups, config, admission), config.output, sources, origin, known)
    before = {shard.name for shard in known.shards} if known else set()
    plan = _point(plan, config, {shard.name for shard in plan.shards} - before)
    plan.save(config.output)
    return plan


def _point(plan: Plan, config: RunConfig, written: set[str]) -> Plan:
    """Where rows share answers, say in the shards just written whose."""
    if not config.data.share_duplicates:
        return plan
    return replace(plan, shards=point_to_firsts(plan.shards, config.output, written))


def _mend(plan: Plan, config: RunConfig, admission: Admission) -> Plan:
    """Make prompt shards that got lost again, from the sources they were made of."""
    lost = missing_shards(config.output, plan.shards)
    if not lost:
        return plan
    groups = plan.groups_of(lost, config.data.limit)
    mended = [shard for shard, _ in _write_shards(groups, config, admission)]
    if gone := {shard.name for shard in lost} - {shard.name for shard in mended}:
        uri = plan.sources[plan.shard(min(gone)).source][0]
        raise InputError(
            f"{uri}: is shorter than when it was planned, and the prompt shard {min(gone)} that was made "
            "of it is lost; put the file back as it was, or choose another output folder"
        )
    plan = plan.with_mended(mended)
    plan = _point(plan, config, {shard.name for shard in lost})
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
        if row["bad_input"]:
            raise InputError(row["bad_input"])
        if row["bad_storage"]:
            raise OSError(row["bad_storage"])
        yield Shard(**json.loads(row["shard"])), schema_from_json(row["schema"])


def _rows(dataset: Dataset) -> Iterator[dict[str, Any]]:
    """Rows as their blocks come; by itself Ray Data holds each block back until the next is there."""
    tables: Iterable[Any] = dataset.iter_batches(
        batch_size=None, batch_format="pyarrow", prefetch_batches=0
    )
    for table in tables:
        yield from table.to_pylist()


def _quiet() -> None:
    """Progress is ours to show: no bars, no banner of every execution, no error told twice."""
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
