"""Committed parts: one schema whatever happened, whole or absent, and sums that add up."""

import errno
import json
import math
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import storage
from pipeline.admission import AdmittedRow
from pipeline.errors import DamagedPartError, InputError
from pipeline.failed_rows import errors_uri
from pipeline.parts import (
    PartReport,
    Provenance,
    answer_row,
    commit_part,
    list_parts,
    part_uri,
    read_report,
    refused_row,
)
from pipeline.requests import build_requests
from pipeline.schema import OUTPUT_SCHEMA, output_schema, plan_table, unify_carried
from pipeline.shards import to_parquet
from pipeline.summary import Summary, write_summary
from workers.config import SamplingParams
from workers.request import Completion, Request, TokenLogprobs
from workers.stats import AcceptanceStats

PROVENANCE = Provenance("a-model", "weights123", "config456", {"torch": "2.13.0", "ray": "2.60.0"})
COMMON = {"attempt": 1, "model": "a-model", "device": "cpu:here", "num_spec_tokens": 3}
SHARD = "00000-00000"


def plan_row(row: int, **fields: Any) -> AdmittedRow:
    whole = {"prompt": f"p{row}", "prompt_token_ids": [1, 2, 3]} | fields
    return AdmittedRow(source="a.jsonl", row=row, id=f"a{row}", **whole)


def refused(row: int, **fields: Any) -> AdmittedRow:
    reason = {"prompt_token_ids": None, "error": "a.jsonl: line 1: no prompt"}
    return plan_row(row, **reason, error_type="NoPrompt", **fields)


def completions_of(row: dict[str, Any], **fields: Any) -> list[Completion]:
    """An answer for every sample of a plan row: token ids 10, 11, ... and the sample's number."""
    made = []
    for request in build_requests(row, SamplingParams(), 0):
        answer = Completion(request, "length", token_ids=(10, request.sample_idx), text="ab")
        made.append(replace(answer, **fields))
    return made


def commit(folder: Path, rows: list[AdmittedRow], **fields: Any) -> PartReport:
    """Answer the admitted rows of a shard and commit it, as an actor does."""
    table = plan_table(rows, {}, "a.jsonl")
    entries: list[tuple[int, dict[str, Any]]] = []
    for index, row in enumerate(table.to_pylist()):
        if row["error"] is not None:
            entries.append((index, refused_row(row, COMMON)))
        else:
            for completion in completions_of(row, **fields):
                entries.append((index, answer_row(completion, row, COMMON)))
    schema = output_schema(unify_carried([(table.schema, table.column)]))
    return commit_part(str(folder), SHARD, entries, table, schema, PROVENANCE)


def read_part(folder: Path) -> pa.Table:
    return pq.read_table(part_uri(str(folder), SHARD))


def test_the_columns_of_the_design() -> None:
    assert set(OUTPUT_SCHEMA.names) >= {
        *("id", "sample_idx", "prompt", "messages", "generated_text", "generated_tokens"),
        *("num_input_tokens", "num_generated_tokens", "finish_reason", "stop_reason"),
        *("cumulative_logprob", "logprobs", "error", "error_type", "attempt", "model", "seed"),
        *("device", "num_steps", "num_spec_steps", "num_draft_tokens", "num_spec_tokens"),
        *("num_accepted_draft_tokens", "acceptance_histogram", "mean_acceptance_length"),
        "draft_acceptance_rate",
    }


def test_one_schema_whether_all_rows_fail_or_none(tmp_path: Path) -> None:
    carried = {"topic": "t", "tags": ["x"], "nothing": None}
    good, bad, mixed = (tmp_path / name for name in ("good", "bad", "mixed"))
    commit(good, [plan_row(i, carried=carried) for i in range(3)])
    commit(bad, [refused(i, carried=carried) for i in range(3)])
    commit(mixed, [plan_row(0, carried=carried), refused(1, carried=carried)])
    schemas = [read_part(folder).schema.remove_metadata() for folder in (good, bad, mixed)]
    assert schemas[0] == schemas[1] == schemas[2]
    assert schemas[0].names == [*OUTPUT_SCHEMA.names, "topic", "tags", "nothing"]
    assert schemas[0].field("nothing").type == pa.string()
    assert not any(pa.types.is_null(field.type) for field in schemas[0])
    assert read_part(bad).column("topic").to_pylist() == ["t"] * 3


def test_a_refused_row_keeps_what_is_known(tmp_path: Path) -> None:
    commit(tmp_path, [refused(4, carried={"topic": "t"})])
    (row,) = read_part(tmp_path).to_pylist()
    assert (row["id"], row["sample_idx"], row["prompt"], row["topic"]) == ("a4", 0, "p4", "t")
    assert (row["finish_reason"], row["error_type"]) == ("error", "NoPrompt")
    assert row["error"] == "a.jsonl: line 1: no prompt"
    assert (row["attempt"], row["model"], row["device"]) == (1, "a-model", "cpu:here")
    for name in ("generated_text", "generated_tokens", "num_generated_tokens", "num_steps"):
        assert row[name] is None, name


def test_a_row_that_failed_in_the_engine(tmp_path: Path) -> None:
    failed = {"finish_reason": "error", "error": "NaN", "error_type": "NonFiniteLogits"}
    report = commit(tmp_path, [plan_row(0)], token_ids=(), text="", **failed)
    (row,) = read_part(tmp_path).to_pylist()
    assert (row["finish_reason"], row["error"], row["error_type"]) == (
        *("error", "NaN", "NonFiniteLogits"),
    )
    assert (row["generated_text"], row["generated_tokens"]) == (None, None)
    assert (report.num_errors, report.num_generated_tokens) == (1, 0)


def test_three_samples_are_three_rows(tmp_path: Path) -> None:
    """ray#53396: ten samples were asked for and one was kept."""
    rows = [plan_row(0), plan_row(1, sampling_params='{"n": 3}'), plan_row(2)]
    report = commit(tmp_path, rows)
    keys = [(row["id"], row["sample_idx"]) for row in read_part(tmp_path).to_pylist()]
    assert keys == [("a0", 0), ("a1", 0), ("a1", 1), ("a1", 2), ("a2", 0)]
    tokens = read_part(tmp_path).column("generated_tokens").to_pylist()
    assert tokens == [[10, 0], [10, 0], [10, 1], [10, 2], [10, 0]]
    assert (report.num_rows, report.num_samples) == (3, 5)


def test_log_probabilities_reach_the_file(tmp_path: Path) -> None:
    """ray#58894: they were computed and then dropped."""
    logprobs = (
        TokenLogprobs(10, -0.5, 1, ((10, -0.5), (7, -1.25))),
        TokenLogprobs(0, -2.25, 3),
    )
    commit(tmp_path, [plan_row(0)], logprobs=logprobs)
    (row,) = read_part(tmp_path).to_pylist()
    top = [{"token_id": 10, "logprob": -0.5}, {"token_id": 7, "logprob": -1.25}]
    assert row["logprobs"] == [
        {"token_id": 10, "logprob": -0.5, "rank": 1, "top": top},
        {"token_id": 0, "logprob": -2.25, "rank": 3, "top": []},
    ]
    assert row["cumulative_logprob"] == -2.75
    commit(tmp_path / "without", [plan_row(0)])
    (row,) = read_part(tmp_path / "without").to_pylist()
    assert (row["logprobs"], row["cumulative_logprob"]) == (None, None)


def test_an_answers_columns(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "é"}]
    stats = AcceptanceStats(num_steps=4, num_draft_tokens=9, histogram=(1, 0, 2, 0))
    row = plan_row(0, prompt=None, messages=messages, sampling_params='{"seed": 77}')
    commit(tmp_path, [row], stats=stats, finish_reason="stop", stop_reason=5, seconds=1.5)
    (answer,) = read_part(tmp_path).to_pylist()
    assert (answer["prompt"], answer["messages"]) == (None, messages)
    assert (answer["generated_text"], answer["generated_tokens"]) == ("ab", [10, 0])
    assert (answer["num_input_tokens"], answer["num_generated_tokens"]) == (3, 2)
    assert (answer["finish_reason"], answer["stop_reason"], answer["seed"]) == ("stop", "5", 77)
    assert (answer["num_steps"], answer["num_spec_steps"]) == (4, 3)
    assert (answer["num_draft_tokens"], answer["num_accepted_draft_tokens"]) == (9, 4)
    assert (answer["acceptance_histogram"], answer["num_spec_tokens"]) == ([1, 0, 2, 0], 3)
    assert answer["mean_acceptance_length"] == pytest.approx(1 + 4 / 3)
    assert answer["draft_acceptance_rate"] == pytest.approx(4 / 9)
    assert answer["time_taken"] == 1.5
    assert abs((datetime.now(UTC) - answer["finished_at"]).total_seconds()) < 60


def test_nothing_drafted_has_no_ratio(tmp_path: Path) -> None:
    commit(tmp_path, [plan_row(0)], stats=AcceptanceStats(2, 0, ()))
    (row,) = read_part(tmp_path).to_pylist()
    assert (row["num_steps"], row["num_spec_steps"], row["acceptance_histogram"]) == (2, 0, [])
    assert (row["mean_acceptance_length"], row["draft_acceptance_rate"]) == (None, None)


def test_a_carried_column_with_one_of_our_names(tmp_path: Path) -> None:
    commit(tmp_path, [plan_row(0, carried={"model": "theirs", "seed": 5, "topic": "t"})])
    (row,) = read_part(tmp_path).to_pylist()
    assert (row["model"], row["input_model"]) == ("a-model", "theirs")
    assert (row["input_seed"], row["topic"]) == (5, "t")


def test_a_carried_column_named_like_a_renamed_one(tmp_path: Path) -> None:
    """`model` becomes input_model, and input_model is there already: both must come out."""
    carried = {"model": "theirs", "input_model": "another"}
    try:
        commit(tmp_path, [plan_row(0, carried=carried)])
    except InputError as error:
        if "input_model" in str(error):
            return  # A refusal that names the column would do as well.
        raise
    schema = pq.read_schema(part_uri(str(tmp_path), SHARD))
    assert len(set(schema.names)) == len(schema.names)
    (row,) = read_part(tmp_path).to_pylist()
    assert {"theirs", "another"} <= {v for v in row.values() if isinstance(v, str)}


def part_of(folder: Path, rows: list[AdmittedRow], others: list[AdmittedRow]) -> list[Any]:
    """Carried column x of a part whose schema is unified with that of another shard."""
    table, other = plan_table(rows, {}, "a.jsonl"), plan_table(others, {}, "b.jsonl")
    schema = output_schema(unify_carried([(t.schema, t.column) for t in (table, other)]))
    entries = [(i, refused_row(row, COMMON)) for i, row in enumerate(table.to_pylist())]
    commit_part(str(folder), SHARD, entries, table, schema, PROVENANCE)
    values: list[Any] = read_part(folder).column("x").to_pylist()
    return values


@pytest.mark.parametrize(
    ("mine", "others", "expected"),
    [
        ([1, None], [0.5], [1.0, None]),
        ([None, None], ["a"], [None, None]),
        ([[]], [["a"]], [[]]),
        ([["a"]], [None], [["a"]]),
        ([{"k": 1}], [{"other": 2}], [{"k": 1, "other": None}]),
        ([[{"k": 1}]], [[{"k": 0.5, "other": "o"}]], [[{"k": 1.0, "other": None}]]),
        ([True], [None], [True]),
    ],
    ids=str,
)
def test_a_carried_column_of_another_type_elsewhere(
    tmp_path: Path, mine: list[Any], others: list[Any], expected: list[Any]
) -> None:
    rows = [refused(i, carried={"x": value}) for i, value in enumerate(mine)]
    assert part_of(tmp_path, rows, [refused(0, carried={"x": v}) for v in others]) == expected


def test_a_carried_column_that_is_elsewhere_only(tmp_path: Path) -> None:
    assert part_of(tmp_path, [refused(0)], [refused(0, carried={"x": 1})]) == [None]


def test_a_large_number_beside_fractions_elsewhere(tmp_path: Path) -> None:
    """2**60 + 1 is no double. Whatever is done about it is done before a shard is generated."""
    mine, others = [refused(0, carried={"x": 2**60 + 1})], [refused(0, carried={"x": 0.5})]
    try:
        tables = plan_table(mine, {}, "a.jsonl"), plan_table(others, {}, "b.jsonl")
        unify_carried([(t.schema, t.column) for t in tables])
    except InputError as error:
        if "'x'" in str(error):
            return
        raise
    assert len(part_of(tmp_path, mine, others)) == 1


def test_the_footer_says_where_a_part_comes_from(tmp_path: Path) -> None:
    commit(tmp_path, [plan_row(0), refused(1)])
    metadata = pq.read_metadata(part_uri(str(tmp_path), SHARD)).metadata
    assert json.loads(metadata[b"quasar"]) == {
        "shard": SHARD,
        "weights_digest": "weights123",
        "config_digest": "config456",
        "versions": {"torch": "2.13.0", "ray": "2.60.0"},
    }


def test_a_report_is_the_sum_of_its_rows(tmp_path: Path) -> None:
    rows = [plan_row(0), refused(1), plan_row(2, sampling_params='{"n": 2}')]
    stats = AcceptanceStats(num_steps=3, num_draft_tokens=5, histogram=(1, 0, 1))
    report = commit(tmp_path, rows, stats=stats, seconds=2.0)
    # Three samples of two tokens, three prompt tokens and `stats` each; one row refused.
    assert (report.shard, report.num_rows, report.num_samples, report.num_errors) == (
        SHARD,
        3,
        4,
        1,
    )
    assert (report.num_input_tokens, report.num_generated_tokens) == (9, 6)
    assert report.stats == AcceptanceStats(9, 15, (3, 0, 3))
    ends = [row["finished_at"].timestamp() for row in read_part(tmp_path).to_pylist()]
    assert report.finished_at == max(ends)
    assert report.started_at == min(ends[0], ends[2], ends[3]) - 2.0
    assert read_report(str(tmp_path), SHARD) == report


def test_a_summary_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    one = PartReport(
        "a", 99, "s", "c", 3, 4, 1, 1, 9, 60, AcceptanceStats(9, 15, (3, 0, 3)), 100.0, 104.0
    )
    two = PartReport(
        "b", 99, "s", "c", 2, 2, 0, 2, 7, 40, AcceptanceStats(4, 5, (1, 2, 0, 1)), 102.0, 110.0
    )
    summary = Summary().add(one).add(two)
    write_summary(str(tmp_path), summary, {"model": "m"})
    written = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert written == {
        "num_shards": 2,
        "num_rows": 5,
        "num_samples": 6,
        "num_errors": 1,
        "num_shared": 3,
        "num_input_tokens": 16,
        "num_generated_tokens": 100,
        "generation_seconds": 10.0,
        "tokens_per_second": 10.0,
        "num_steps": 13,
        "num_spec_steps": 10,  # 6 + 4
        "num_draft_tokens": 20,
        "num_accepted_draft_tokens": 11,  # 2 * 3 + 1 * 2 + 3 * 1
        "acceptance_histogram": [4, 2, 3, 1],
        "mean_acceptance_length": pytest.approx(2.1),
        "draft_acceptance_rate": pytest.approx(0.55),
        "model": "m",
    }


def test_pauses_are_no_time_of_a_run() -> None:
    spans = [(100.0, 104.0), (110.0, 112.0), (103.0, 105.0), (111.0, 111.5), (104.5, 110.0)]
    summary = Summary()
    for seconds, (start, end) in zip([4, 6, 7, 7, 12], spans, strict=True):
        report = PartReport("a", 9, "s", "c", 1, 1, 0, 0, 1, 1, AcceptanceStats(), start, end)
        summary = summary.add(report)
        assert summary.seconds == seconds
    assert summary.spans == ((100.0, 112.0),)


def test_a_summary_of_nothing_is_json() -> None:
    text = json.dumps(Summary().to_dict())
    assert "Infinity" not in text
    assert json.loads(text)["tokens_per_second"] == 0


def test_presence_is_progress(tmp_path: Path) -> None:
    assert list_parts(str(tmp_path)) == {}
    report = commit(tmp_path, [plan_row(0)])
    assert list_parts(str(tmp_path)) == {SHARD: report.num_bytes}
    assert [p.name for p in (tmp_path / "data").iterdir()] == [f"part-{SHARD}.parquet"]


def test_failed_rows_lie_whole_among_the_errors(tmp_path: Path) -> None:
    carried = {"topic": "t", "error": "the input's own"}
    report = commit(tmp_path, [plan_row(0, carried=carried), refused(1, carried=carried)])
    assert report.num_errors == 1
    (row,) = pq.read_table(errors_uri(str(tmp_path), SHARD)).to_pylist()
    assert (row["id"], row["prompt"], row["source"], row["row"]) == ("a1", "p1", "a.jsonl", 1)
    assert (row["error_type"], row["sample_idx"]) == ("NoPrompt", 0)
    assert row["error"] == "a.jsonl: line 1: no prompt"
    assert (row["carried.topic"], row["carried.error"]) == ("t", "the input's own")
    commit(tmp_path, [plan_row(0), plan_row(1)])  # Tried again, and well.
    assert list((tmp_path / "errors").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"no parquet", None])
def test_a_damaged_part_is_named(tmp_path: Path, content: bytes | None) -> None:
    commit(tmp_path, [plan_row(0)])
    path = Path(part_uri(str(tmp_path), SHARD))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(DamagedPartError, match=f"{path}: is damaged"):
        read_report(str(tmp_path), SHARD)
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(DamagedPartError, match="holds the rows of no shard of ours"):
        read_report(str(tmp_path), SHARD)
    path.unlink()
    with pytest.raises(DamagedPartError, match="missing"):
        read_report(str(tmp_path), SHARD)


FAILING = ("fsync", "rename", "write")


@pytest.mark.parametrize("failing", FAILING)
@pytest.mark.parametrize("before", [None, b"old"])
def test_a_write_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, before: bytes | None
) -> None:
    target = tmp_path / "data" / "part.parquet"
    if before is not None:
        storage.write_atomic(str(target), before)
    seen: list[bytes | None] = []

    def fail(*_: Any, **__: Any) -> None:
        seen.append(target.read_bytes() if target.exists() else None)
        raise OSError(errno.ENOSPC, "no space left on device")  # No use to try again.

    if failing == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    elif failing == "rename":
        monkeypatch.setattr(Path, "replace", fail)
    content = memoryview(b"new" * 100_000)
    with pytest.raises(OSError if failing != "write" else TypeError):
        storage.write_atomic(str(target), content if failing != "write" else "text")  # type: ignore[arg-type]
    assert (target.read_bytes() if target.exists() else None) == before
    assert seen in ([], [before])  # Nobody could have read half a file in the meantime either.
    assert [p.name for p in target.parent.iterdir()] == ([target.name] if before else [])


def test_a_part_is_written_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies while writing leaves no part: the name is given last."""
    uri = storage.local_path(part_uri(str(tmp_path), SHARD))
    original, states = Path.replace, []

    def watch(self: Path, target: Path) -> Path:
        states.append((target == uri, uri.exists(), pq.read_table(self).num_rows))
        return original(self, target)

    monkeypatch.setattr(Path, "replace", watch)
    commit(tmp_path, [plan_row(i) for i in range(5)])
    assert states == [(True, False, 5)]
    assert read_part(tmp_path).num_rows == 5


def test_what_was_left_aside_is_no_part(tmp_path: Path) -> None:
    """SIGKILL in the middle of a write leaves a file aside; nobody takes it for a part."""
    folder = tmp_path / "data"
    folder.mkdir()
    whole = to_parquet(pa.table({"a": [1]}))
    (folder / f".part-{SHARD}.parquet.0123.tmp").write_bytes(whole[: len(whole) // 2])
    assert list_parts(str(tmp_path)) == {}
    assert list(folder.glob("*.parquet")) == []
    commit(tmp_path, [plan_row(0)])
    storage.remove_leftovers(str(folder))
    assert [p.name for p in folder.iterdir()] == [f"part-{SHARD}.parquet"]
    assert read_part(tmp_path).num_rows == 1


def test_text_that_is_not_ascii(tmp_path: Path) -> None:
    request_text = "Größe 文 \U0001f600 \x00"
    commit(tmp_path, [plan_row(0, prompt=request_text)], text=request_text)
    (row,) = read_part(tmp_path).to_pylist()
    assert (row["prompt"], row["generated_text"]) == (request_text, request_text)


def test_an_infinite_log_probability(tmp_path: Path) -> None:
    commit(tmp_path, [plan_row(0)], logprobs=(TokenLogprobs(10, -math.inf, 2),))
    (row,) = read_part(tmp_path).to_pylist()
    assert row["cumulative_logprob"] == -math.inf


def test_requests_know_their_row() -> None:
    row = {"id": "x", "prompt_token_ids": [1], "sampling_params": None, "prompt_digest": None}
    assert build_requests(row, SamplingParams(), 3)[0] == Request(
        "x", (1,), SamplingParams(), build_requests(row, SamplingParams(), 3)[0].seed
    )
