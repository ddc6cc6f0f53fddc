"""Committed parts: one Parquet file per shard, put in place in one step. Presence is progress."""

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline import failpoints, storage
from pipeline.errors import DamagedPartError
from pipeline.failed_rows import write_errors
from pipeline.schema import OUTPUT_SCHEMA, footer, output_table, schema_digest
from pipeline.shards import to_parquet
from pipeline.sums import numbers, sum_rows
from workers.request import Completion, Request, TokenLogprobs
from workers.stats import AcceptanceStats
from workers.step_times import StepTimes


@dataclass(frozen=True)
class Provenance:
    """What every part of a run says about its making, in its footer and columns.

    Attributes:
        worker: the process that made it.
        max_num_seqs: rows it generates at once.
        step_times: what passes cost there; None where they were not measured.
    """

    model: str
    weights_digest: str
    config_digest: str
    versions: dict[str, str]
    worker: str | None = None
    max_num_seqs: int | None = None
    step_times: StepTimes | None = None

    def footer(self, shard: str) -> dict[bytes, bytes]:
        """The footer of a shard's part."""
        times = self.step_times
        known = {
            "shard": shard,
            "weights_digest": self.weights_digest,
            "config_digest": self.config_digest,
            "versions": self.versions,
            "worker": self.worker,
            "max_num_seqs": self.max_num_seqs,
            # Four digits are more than is measured.
            "step_times": times
            and [
                [n, float(f"{s:.4g}")] for n, s in zip(times.num_tokens, times.seconds, strict=True)
            ],
        }
        return footer({key: value for key, value in known.items() if value is not None})


@dataclass(frozen=True)
class PartReport:
    """What one part adds up to; times are seconds since the epoch.

    `sha256` is of the file's bytes, `schema` of its schema. `num_shared` samples are the answers of other
    rows, which tokens and statistics do not count again.
    """

    shard: str
    num_bytes: int
    sha256: str
    schema: str
    num_rows: int
    num_samples: int
    num_errors: int
    num_shared: int
    num_input_tokens: int
    num_generated_tokens: int
    stats: AcceptanceStats
    started_at: float
    finished_at: float

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "PartReport":
        """The report that `dataclasses.asdict` took apart; raises TypeError or KeyError if it did not."""
        stats = raw["stats"]
        counts = stats["num_steps"], stats["num_draft_tokens"], tuple(stats["histogram"])
        return cls(**raw | {"stats": AcceptanceStats(*counts)})


def part_uri(output: str, shard: str) -> str:
    """Where a shard's part lies."""
    return storage.join(output, "data", f"part-{shard}.parquet")


def list_parts(output: str) -> dict[str, int]:
    """The bytes of every part that is in place, by its shard; raises OSError."""
    parts = {}
    for uri, num_bytes in storage.list_files(storage.join(output, "data")).items():
        name = uri.rpartition("/")[2]
        if name.startswith("part-") and name.endswith(".parquet"):
            parts[name.removeprefix("part-").removesuffix(".parquet")] = num_bytes
    return parts


def commit_part(
    output: str,
    shard: str,
    rows: Sequence[tuple[int, dict[str, Any]]],
    plan: pa.Table,
    schema: pa.Schema,
    provenance: Provenance,
    *,
    is_first: bool = False,
) -> PartReport:
    """Write a shard's part: rows are (index in the plan's shard, our columns), in the shard's order.

    Where it is the first try, there is nothing of an earlier one to be removed.
    """
    keys = {(row["id"], row["sample_idx"]) for _, row in rows}
    assert len(keys) == len(rows), f"shard {shard}: a sample twice"
    table = output_table([row for _, row in rows], plan, [index for index, _ in rows], schema)
    content = to_parquet(table.replace_schema_metadata(provenance.footer(shard)))
    write_errors(output, shard, table, plan, may_be_there=not is_first)
    storage.write_atomic(part_uri(output, shard), content)
    failpoints.reach("part-placed", shard)
    return report_of(shard, table, content)


def read_part(output: str, shard: str) -> tuple[pa.Table, bytes]:
    """A part that is in place, and the bytes of its file; raises DamagedPartError."""
    uri = part_uri(output, shard)
    content = storage.read_bytes(uri)
    if content is None:
        raise DamagedPartError(f"{uri}: is missing")
    try:
        table = pq.read_table(io.BytesIO(content))
    except (OSError, pa.ArrowException) as error:
        raise DamagedPartError(f"{uri}: is damaged ({error})") from error
    whose = shard_of(table)
    if whose != shard:
        raise DamagedPartError(
            f"{uri}: is damaged (it holds the rows of {whose or 'no shard of ours'})"
        )
    return table, content


def find_part(output: str, shard: str, num_rows: int) -> PartReport | None:
    """The report of a part of so many rows that is in place and whole; None if there is none."""
    try:
        report = read_report(output, shard)
    except DamagedPartError:  # Missing, too.
        return None
    return report if report.num_rows == num_rows else None


def shard_of(table: pa.Table) -> str:
    """The shard that a part's footer names; empty if it names none."""
    try:
        return str(json.loads((table.schema.metadata or {})[b"quasar"])["shard"])
    except (KeyError, ValueError, TypeError):
        return ""


def read_report(output: str, shard: str) -> PartReport:
    """The report of a part that is in place; raises DamagedPartError."""
    table, content = read_part(output, shard)
    if missing := [name for name in _REPORTED if name not in table.column_names]:
        uri = part_uri(output, shard)
        raise DamagedPartError(f"{uri}: is damaged (it has no column {missing[0]!r})")
    return report_of(shard, table, content)


_REPORTED = (
    "id",
    "answer_of",
    "error",
    "num_input_tokens",
    "num_generated_tokens",
    "num_steps",
    "num_draft_tokens",
    "acceptance_histogram",
    "time_taken",
    "finished_at",
)


def report_of(shard: str, table: pa.Table, content: bytes) -> PartReport:
    """What a part of these rows, in a file of this content, adds up to."""
    total = sum_rows(table)
    own = table.filter(table["answer_of"].is_null())
    ends = table["finished_at"].cast(pa.int64()).to_numpy() / 1e6
    own_seconds = numbers(table, "time_taken") * table["answer_of"].is_null().to_numpy()
    return PartReport(
        shard=shard,
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        schema=schema_digest(table.schema),
        num_rows=pc.count_distinct(table["id"]).as_py(),
        num_samples=total.num_samples,
        num_errors=total.num_errors,
        num_shared=len(table) - len(own),
        num_input_tokens=int(numbers(own, "num_input_tokens").sum()),
        num_generated_tokens=total.num_tokens,
        stats=total.stats,
        started_at=float((ends - own_seconds).min()),
        finished_at=float(ends.max()),
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


def dead_rows(
    requests: Sequence[Request], num_deaths: int, plan_row: dict[str, Any], common: dict[str, Any]
) -> list[dict[str, Any]]:
    """Our columns for the samples of a row that kills its worker."""
    reason = {
        "error": f"the worker's process died with this row under way, {num_deaths} times, the last "
        "time with nothing else under way",
        "error_type": "WorkerDied",
        "finish_reason": "error",
    }
    row = _row(plan_row, common) | reason
    return [row | {"sample_idx": r.sample_idx, "seed": r.seed} for r in requests]


def shared_row(answer: dict[str, Any], plan_row: dict[str, Any]) -> dict[str, Any]:
    """The answer of another row, as that of this one."""
    return answer | {
        "id": plan_row["id"],
        "prompt": plan_row["prompt"],
        "messages": plan_row["messages"],
        "answer_of": answer["answer_of"] or answer["id"],
        "finished_at": datetime.now(UTC),
    }


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
