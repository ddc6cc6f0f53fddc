"""Output folders as a run leaves them, made without a model and without Ray."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline import storage
from pipeline.admission import Admission
from pipeline.config import RunConfig
from pipeline.duplicates import point_to_firsts
from pipeline.manifest import Manifest
from pipeline.parts import Provenance, answer_row, commit_part, refused_row
from pipeline.plan import Plan, assemble, group_sources, name_sources
from pipeline.requests import build_requests
from pipeline.schema import PLAN_SCHEMA, output_schema
from pipeline.shards import Shard, SourceGroup, read_shard, write_shards
from workers.request import Completion, Request
from workers.stats import AcceptanceStats

Answer = Callable[[Request], Completion]


def write_jsonl(path: Path, rows: Iterable[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def make_plan(
    admission: Admission,
    uris: list[str],
    output: Path,
    limit: int | None = None,
    rows_per_shard: int = 256,
) -> Plan:
    """What `pipeline.graph.write_plan` does, without Ray; groups in reverse, as actors may end."""
    known = Plan.load(str(output))
    sources = name_sources(uris, known.sources if known else ())
    written: list[tuple[Shard, pa.Schema]] = []
    for group in reversed(group_sources(sources, limit, known)):
        group = SourceGroup.from_json(group.to_json())
        written += write_shards(group, admission, str(output), rows_per_shard)
    plan = assemble(written, str(output), sources, {"weights": "w", "tokenizer": "t"}, known)
    added = {shard.name for shard, _ in written}
    plan = replace(plan, shards=point_to_firsts(plan.shards, str(output), added))
    plan.save(str(output))
    return plan


def answer(request: Request) -> Completion:
    """Five tokens in three steps, one of which accepted two of three drafted tokens."""
    stats = AcceptanceStats(3, 3, (0, 0, 1, 0))
    tokens = tuple(range(10, 15))
    return Completion(request, "length", tokens, f"to {request.id}", stats=stats, seconds=0.5)


def fail(request: Request) -> Completion:
    return Completion(request, "error", error="NaN", error_type="NonFiniteLogits")


def commit(
    output: Path, plan: Plan, name: str, config: RunConfig, how: Answer = answer, **made: Any
) -> None:
    """Put the part of a shard in place; `made` is what else is told of its making."""
    table = read_shard(str(output), name)
    common = {"attempt": 1, "model": "m", "device": "cpu:here", "num_spec_tokens": 3}
    rows: list[tuple[int, dict[str, Any]]] = []
    for index, row in enumerate(table.select(PLAN_SCHEMA.names).to_pylist()):
        if row["error"] is not None:
            rows.append((index, refused_row(row, common)))
            continue
        for request in build_requests(row, config.sampling, config.seed):
            rows.append((index, answer_row(how(request), row, common)))
    schema = output_schema(plan.carried)
    provenance = replace(Provenance("m", "w", config.digest(), {}), **made)
    commit_part(str(output), name, rows, table, schema, provenance)


def make_output(
    admission: Admission, output: Path, rows: Iterable[Any], rows_per_shard: int = 4
) -> tuple[RunConfig, Plan]:
    """A complete run on these rows, with its manifest."""
    uri = write_jsonl(output.parent / "in.jsonl", rows)
    config = RunConfig(model="m", input=(uri,), output=str(output))
    storage.write_atomic(str(output / "config.yaml"), config.to_yaml().encode())
    plan = make_plan(admission, [uri], output, rows_per_shard=rows_per_shard)
    for shard in plan.shards:
        commit(output, plan, shard.name, config)
    manifest = Manifest(str(output))
    manifest.find_parts(plan.shards)
    manifest.save()
    return config, plan
