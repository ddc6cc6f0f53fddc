"""The report: sums over parts against the rows themselves, a page and a card."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from jobs.__main__ import main
from pipeline.admission import Admission, load_tokenizer
from pipeline.errors import DamagedPartError
from pipeline.run_stats import RunStats, read_stats
from pipeline.spans import Spans
from pipeline.sums import Kind
from tests.outputs import answer, commit, fail, make_output
from workers.config import SamplingParams
from workers.request import Completion, Request
from workers.stats import AcceptanceStats

ROWS: list[dict[str, Any]] = [
    {"id": f"r{i}", "prompt": f"p{i}", "topic": "abc"[i % 3], "number": i, "half": i / 2}
    for i in range(40)
]
ROWS[7] |= {"sampling_params": {"n": 3}}
ROWS[9] = {"id": "r9", "topic": None}  # No prompt.
for row in ROWS[10:]:
    row["prompt"] += "<script>alert(1)</script>"


def some_answer(request: Request) -> Completion:
    """Of different lengths; some with nothing drafted, some failed."""
    number = int(request.id[1:])
    if number % 8 == 5:
        return fail(request)
    if number % 8 == 6:
        tokens, stats = tuple(range(4)), AcceptanceStats(4, 0, ())
    else:
        tokens, stats = tuple(range(4 + number % 5)), AcceptanceStats(3, 9, (1, number % 5))
    return Completion(request, "stop", tokens, "<b>text</b>", stats=stats, seconds=1.0 + number)


@pytest.fixture(scope="module")
def admission(tiny_checkpoint: Path) -> Admission:
    tokenizer = load_tokenizer(tiny_checkpoint)
    return Admission(tokenizer, SamplingParams(), 60, len(tokenizer))


@pytest.fixture
def output(admission: Admission, tmp_path: Path) -> Path:
    config, plan = make_output(admission, tmp_path / "out", ROWS, rows_per_shard=16)
    for shard in plan.shards:
        commit(tmp_path / "out", plan, shard.name, config, some_answer)
    return tmp_path / "out"


def rows_of(output: Path) -> list[dict[str, Any]]:
    parts = sorted((output / "data").iterdir())
    return [row for part in parts for row in pq.read_table(part).to_pylist()]


def sum_of(rows: list[dict[str, Any]]) -> Kind:
    stats = AcceptanceStats()
    for row in rows:
        if row["acceptance_histogram"] is not None:
            histogram = tuple(row["acceptance_histogram"])
            stats += AcceptanceStats(row["num_steps"] or 0, row["num_draft_tokens"] or 0, histogram)
    return Kind(
        len(rows),
        sum(row["error"] is not None for row in rows),
        sum(row["num_generated_tokens"] or 0 for row in rows),
        sum(row["time_taken"] or 0.0 for row in rows),
        stats,
    )


def assert_same(found: Kind, expected: Kind) -> None:
    assert found.num_samples == expected.num_samples
    assert found.num_errors == expected.num_errors
    assert found.num_tokens == expected.num_tokens
    assert found.seconds == pytest.approx(expected.seconds)
    nothing = AcceptanceStats()  # Histograms may differ in how many zeros they end with.
    for one, other in ((found, expected), (expected, found)):
        width = max(len(one.stats.histogram), len(other.stats.histogram))
        padded = nothing + AcceptanceStats(0, 0, (0,) * width)
        assert one.stats + padded == other.stats + padded


def test_sums_are_those_of_the_rows(output: Path) -> None:
    stats, rows = read_stats(str(output)), rows_of(output)
    assert (stats.num_rows, stats.num_shared) == (40, 0)
    assert_same(stats.total, sum_of(rows))
    assert stats.finish_reasons == Counter(row["finish_reason"] for row in rows)
    assert stats.errors == {"NonFiniteLogits": 5, "NoPrompt": 1}
    assert stats.error_examples["NonFiniteLogits"] == "NaN"
    assert stats.kinds.keys() == {"topic"}, "numbers of 40 values and fractions are no kinds"
    for topic in ("a", "b", "c", ""):
        mine = [row for row in rows if (row["topic"] or "") == topic]
        assert_same(stats.kinds["topic"][topic], sum_of(mine))
    slowest = sorted((row["time_taken"] for row in rows if not row["error"]), reverse=True)
    assert [row["time_taken"] for row in stats.slowest] == slowest[:10]
    assert len({row["id"] for row in stats.answers}) == 5
    assert len(stats.footers) == 1


def test_answers_of_other_rows_are_counted_and_no_more(output: Path) -> None:
    whole, shared = RunStats(), RunStats()
    for part in sorted((output / "data").iterdir()):
        table = pq.read_table(part)
        whole.add(table)
        column = table.schema.get_field_index("answer_of")
        shared.add(table.set_column(column, "answer_of", table["id"]))
    assert shared.total.num_samples == shared.num_shared == whole.total.num_samples
    assert (shared.total.num_tokens, shared.total.seconds) == (0, 0.0)
    assert shared.total.stats.num_spec_steps == 0
    assert len(shared.spans.starts) == 0


def test_work_is_spread_over_its_time() -> None:
    starts, ends = np.array([100.0, 102.0, 110.0]), np.array([104.0, 104.0, 111.0])
    nothing = np.zeros(3, np.int64)
    spans = Spans(starts, ends, *[nothing] * 5)
    assert spans.seconds == 5.0  # The six seconds without are none of it.
    edges = spans.edges(11)
    assert edges.tolist() == list(range(100, 112))
    under_way = spans.over_time(spans.rows, edges)
    assert under_way == pytest.approx([1, 1, 2, 2, 0, 0, 0, 0, 0, 0, 1], abs=1e-6)
    tokens = spans.over_time(np.array([8.0, 4.0, 5.0]), edges)
    assert tokens == pytest.approx([2, 2, 4, 4, 0, 0, 0, 0, 0, 0, 5], abs=1e-6)


def test_a_page_that_needs_nothing_else(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(output)]) == 0
    assert "report.html" in capsys.readouterr().err
    page = (output / "report.html").read_text(encoding="utf-8")
    own = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert re.findall(r"(?:src|href)=\S+", own) == []
    for title in ("Tokens per second", "Rows under way", "Acceptance by position", "Lengths"):
        assert f"<h2>{title}</h2>" in page
    assert "Acceptance length by topic" in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert(1)" not in page
    assert "&lt;b&gt;text&lt;/b&gt;" in page
    assert "NonFiniteLogits" in page


def test_a_card_for_the_hub(output: Path, tmp_path: Path) -> None:
    target = tmp_path / "card.md"
    assert main(["report", str(output), "--format", "md", "--into", str(target)]) == 0
    _, head, body = target.read_text(encoding="utf-8").split("---\n", 2)
    known = yaml.safe_load(head)
    assert known["size_categories"] == ["n<1K"]
    assert known["configs"] == [{"config_name": "default", "data_files": "data/*.parquet"}]
    for line in body.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")
    assert "| rows | 40 |" in body
    assert "| a | " in body
    assert not (output / "README.md").exists()


@pytest.mark.parametrize("how", [fail, answer])
def test_a_run_of_which_all_failed_or_nothing_was_drafted(
    admission: Admission, tmp_path: Path, how: Any
) -> None:
    output = tmp_path / "out"
    config, plan = make_output(admission, output, [{"prompt": "a"}])

    def undrafted(request: Request) -> Completion:
        done = how(request)
        return replace(done, stats=AcceptanceStats(len(done.token_ids), 0, ()))

    commit(output, plan, plan.shards[0].name, config, undrafted)
    for form in ("html", "md"):
        assert main(["report", str(output), "--format", form]) == 0
    page = (output / "report.html").read_text(encoding="utf-8")
    assert ("Tokens per second" in page) == (how is answer)
    assert "Acceptance by position" not in page


def test_what_cannot_be_reported_on(
    output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "has no parts to report on" in capsys.readouterr().err
    (tmp_path / "file").write_text("x", encoding="utf-8")
    assert main(["report", str(output), "--into", str(tmp_path / "file" / "x.html")]) == 2
    assert "cannot be used" in capsys.readouterr().err
    part = sorted((output / "data").iterdir())[0]
    table = pq.read_table(part)
    pq.write_table(table.drop_columns(["answer_of"]), part)
    with pytest.raises(DamagedPartError, match="no column 'answer_of'"):
        read_stats(str(output))
    part.write_bytes(b"cut off")
    assert main(["report", str(output)]) == 4
    told = capsys.readouterr().err
    assert f"{part}: is damaged" in told
    assert "Traceback" not in told


def test_how_it_was_asked_for_is_told_where_it_is_known(output: Path) -> None:
    (output / "config.yaml").unlink()
    assert main(["report", str(output), "--format", "md"]) == 0
    without = (output / "README.md").read_text(encoding="utf-8")
    assert "sampling" not in without
    summary = {
        "model": "org/Model-1B",
        "precision": "w8a8",
        "weights": {
            "recipe": "m2",
            "int8_share_of_linears": 0.95,
            "top1_agreement": 0.991,
            "mean_kl": 0.0021,
        },
    }
    (output / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    assert main(["report", str(output), "--format", "md"]) == 0
    card = (output / "README.md").read_text(encoding="utf-8")
    assert "recipe m2, 95.0% of the linears in int8" in card
    assert "99.1% of first choices" in card
