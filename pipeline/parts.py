"""Committed parts: one Parquet file per shard, put in place in one step. Presence is progress."""

import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.schema import OUTPUT_SCHEMA, footer, output_table
from pipeline.shards import to_parquet
from workers.request import Completion, TokenLogprobs
from workers.stats import AcceptanceStats


@dataclass(frozen=True)
class Provenance:
    """What every part of a run says about its making, in its footer and columns."""

    model: str
    weights_digest: str
    config_digest: str
    versions: dict[str, str]


@dataclass(frozen=True)
class PartReport:
    """What one part adds up to; times are seconds since the epoch."""

    shard: str
    num_rows: int
    num_samples: int
    num_errors: int
    num_input_tokens: int
    num_generated_tokens: int
    stats: AcceptanceStats
    started_at: float
    finished_at: float


def part_uri(output: str, shard: str) -> str:
    """Where a shard's part lies."""
    return storage.join(output, "data", f"part-{shard}.parquet")


def pending_shards(output: str, shards: Iterable[str]) -> list[str]:
    """The shards whose part is not there yet."""
    return [shard for shard in shards if not storage.exists(part_uri(output, shard))]


def next_attempt(output: str, shard: str) -> int:
    """Count and record a try at a shard: 1 for the first. It outlives the process that tries."""
    uri = storage.join(output, "attempts", f"{shard}.json")
    before = storage.read_bytes(uri)
    attempt = 1 + (json.loads(before)["attempt"] if before else 0)
    storage.write_atomic(uri, json.dumps({"attempt": attempt}).encode())
    return attempt


def commit_part(
    output: str,
    shard: str,
    rows: Sequence[tuple[int, dict[str, Any]]],
    plan: pa.Table,
    schema: pa.Schema,
    provenance: Provenance,
) -> PartReport:
    """Write a shard's part: rows are (index in the plan's shard, our columns), in the shard's order."""
    table = output_table([row for _, row in rows], plan, [index for index, _ in rows], schema)
    metadata = footer(
        {
            "shard": shard,
            "weights_digest": provenance.weights_digest,
            "config_digest": provenance.config_digest,
            "versions": provenance.versions,
        }
    )
    storage.write_atomic(
        part_uri(output, shard), to_parquet(table.replace_schema_metadata(metadata))
    )
    return _report(shard, table)


def read_report(output: str, shard: str) -> PartReport:
    """The report of a part that is already in place."""
    content = storage.read_bytes(part_uri(output, shard))
    assert content is not None
    return _report(shard, pq.read_table(io.BytesIO(content), columns=list(_REPORTED)))


_REPORTED = (
    "id",
    "finish_reason",
    "num_input_tokens",
    "num_generated_tokens",
    "num_steps",
    "num_draft_tokens",
    "acceptance_histogram",
    "time_taken",
    "finished_at",
)


def _report(shard: str, table: pa.Table) -> PartReport:
    rows = table.select(list(_REPORTED)).to_pylist()
    stats = AcceptanceStats()
    for row in rows:
        if row["acceptance_histogram"] is not None:
            histogram = tuple(row["acceptance_histogram"])
            stats += AcceptanceStats(row["num_steps"], row["num_draft_tokens"], histogram)
    ends = [row["finished_at"].timestamp() for row in rows]
    return PartReport(
        shard=shard,
        num_rows=len({row["id"] for row in rows}),
        num_samples=len(rows),
        num_errors=sum(row["finish_reason"] == "error" for row in rows),
        num_input_tokens=sum(row["num_input_tokens"] or 0 for row in rows),
        num_generated_tokens=sum(row["num_generated_tokens"] or 0 for row in rows),
        stats=stats,
        started_at=min(end - (row["time_taken"] or 0) for end, row in zip(ends, rows, strict=True)),
        finished_at=max(ends),
    )


def answer_row(
    completion: Completion, plan_row: dict[str, Any], common: dict[str, Any]
) -> dict[str, Any]:
    """Our columns for a completion, error completions included."""
    stats, logprobs = completion.stats, completion.logprobs
    failed = completion.finish_reason == "error"
    return _row(plan_row, common) | {
        "sample_idx": completion.request.sample_idx,
        "generated_text": None if failed else completion.text,
        "generated_tokens": None if failed else list(completion.token_ids),
        "num_input_tokens": len(completion.request.prompt_token_ids),
        "num_generated_tokens": None if failed else len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": None if completion.stop_reason is None else str(completion.stop_reason),
        "cumulative_logprob": None if logprobs is None else sum(p.logprob for p in logprobs),
        "logprobs": None if logprobs is None else [_logprob(p) for p in logprobs],
        "error": completion.error,
        "error_type": completion.error_type,
        "seed": completion.request.seed,
        "time_taken": completion.seconds,
        "num_steps": stats.num_steps,
        "num_spec_steps": stats.num_spec_steps,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
        "acceptance_histogram": list(stats.histogram),
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
    }


def refused_row(plan_row: dict[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    """Our columns for a row that the plan refused."""
    reason = {"error": plan_row["error"], "error_type": plan_row["error_type"]}
    return _row(plan_row, common) | reason | {"finish_reason": "error"}


def _row(plan_row: dict[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    """What every row of a part says; the rest is null until filled in."""
    row: dict[str, Any] = dict.fromkeys(OUTPUT_SCHEMA.names)
    row |= {"id": plan_row["id"], "sample_idx": 0, "finished_at": datetime.now(UTC)}
    return row | {"prompt": plan_row["prompt"], "messages": plan_row["messages"]} | common


def _logprob(position: TokenLogprobs) -> dict[str, Any]:
    return {
        "token_id": position.token_id,
        "logprob": position.logprob,
        "rank": position.rank,
        "top": [{"token_id": token_id, "logprob": value} for token_id, value in position.top],
    }
