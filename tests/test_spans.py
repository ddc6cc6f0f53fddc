"""What is told of workers and their time: worked out by hand from a few samples."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.__main__ import main
from pipeline.admission import Admission, load_tokenizer
from pipeline.run_stats import RunStats, read_stats
from pipeline.spans import Saved, Spans, WorkerSpans
from tests.outputs import answer, commit, make_output
from workers.config import SamplingParams
from workers.step_times import StepTimes

# One token takes 1 s, two 1.2, four 1.6: each beyond the first 0.2.
TIMES = StepTimes((1, 2, 4, 8), (1.0, 1.2, 1.6, 2.4))


def worker(
    times: list[tuple[float, float]],
    counts: list[tuple[int, int, int, int]],
    known: StepTimes | None,
) -> WorkerSpans:
    """Samples by (start, end) and (tokens, steps, steps with a draft, drafted tokens)."""
    starts, ends = np.array(times).T
    tokens, steps, spec_steps, drafts = np.array(counts).T
    spans = Spans(starts, ends, tokens, np.zeros(len(times)), steps, spec_steps, drafts)
    return WorkerSpans(spans, 2, known)


def test_time_saved_where_every_step_has_a_draft() -> None:
    # Two rows; after the first token 10 tokens each in 5 passes, a drafted token each: five passes of 4
    # tokens against ten of 2.
    counts = [(11, 6, 5, 5), (11, 6, 5, 5)]
    saved = worker([(0.0, 10.0), (0.0, 10.0)], counts, TIMES).saved
    assert saved is not None
    assert saved.seconds == pytest.approx(5 * 1.6, rel=1e-4)
    assert saved.plain_seconds == pytest.approx(10 * 1.2, rel=1e-4)
    assert saved.num_tokens == 20
    assert saved.share == pytest.approx(1 / 3, rel=1e-3)


def test_time_saved_where_half_of_the_steps_have_a_draft() -> None:
    # Of a pass's two rows none (1 in 4), one (2 in 4) or both (1 in 4) draft two tokens: 2, 4 or 6.
    counts = [(13, 9, 4, 8), (13, 9, 4, 8)]
    saved = worker([(0.0, 10.0), (0.0, 10.0)], counts, TIMES).saved
    assert saved is not None
    assert saved.seconds == pytest.approx(8 * (1.2 / 4 + 1.6 / 2 + 2.0 / 4), rel=1e-4)
    assert saved.plain_seconds == pytest.approx(12 * 1.2, rel=1e-4)


def test_a_row_that_is_left_alone_pays_its_passes_alone() -> None:
    # For 10 s both, one drafted token each in each of the 5 passes; for another 10 s the second alone.
    counts = [(11, 6, 5, 5), (21, 11, 10, 10)]
    saved = worker([(0.0, 10.0), (0.0, 20.0)], counts, TIMES).saved
    assert saved is not None
    assert saved.seconds == pytest.approx(5 * 1.6 + 5 * 1.2, rel=1e-4)
    assert saved.plain_seconds == pytest.approx(10 * 1.2 + 10 * 1.0, rel=1e-4)


def test_drafts_that_were_wrong_cost() -> None:
    saved = worker([(0.0, 10.0)], [(11, 11, 10, 10)], TIMES).saved
    assert saved is not None
    assert (saved.seconds, saved.plain_seconds) == pytest.approx((12.0, 10.0), rel=1e-4)
    assert saved.share == pytest.approx(-0.2, rel=1e-3)
    total = saved + Saved(8.0, 10.0, 5, 30.0)
    assert total == Saved(*(pytest.approx(n) for n in (20.0, 20.0, 15, 40.0)))


def test_an_estimate_that_explains_little_of_the_time_is_not_shown(output: Path) -> None:
    def told() -> str:
        assert main(["report", str(output), "--format", "md"]) == 0
        return (output / "README.md").read_text(encoding="utf-8")

    # Four rows in each part: two passes after the first one, with three drafted tokens in one of them.
    for part in (output / "data").iterdir():
        at(part, [3.0, 3.0, 3.0, 3.0])
    card = told()
    assert "| of the decoding time saved by drafts (estimate) | " in card
    assert "the 32 tokens had taken" in card
    for part in (output / "data").iterdir():
        at(part, [30.0, 30.0, 30.0, 30.0])
    card = told()
    assert "of the decoding time saved" not in card
    assert "none that can be told: of the 60.0 s that workers were busy" in card


def test_without_drafts_or_step_times_nothing_is_estimated() -> None:
    assert worker([(0.0, 10.0)], [(11, 11, 0, 0)], TIMES).saved is None
    assert worker([(0.0, 10.0)], [(11, 6, 5, 5)], None).saved is None


@pytest.fixture(scope="module")
def admission(tiny_checkpoint: Path) -> Admission:
    tokenizer = load_tokenizer(tiny_checkpoint)
    return Admission(tokenizer, SamplingParams(), 60, len(tokenizer))


@pytest.fixture
def output(admission: Admission, tmp_path: Path) -> Path:
    """Two parts of four rows; what ran at once is set by `at`."""
    rows = [{"id": f"r{i}", "prompt": f"p{i}"} for i in range(8)]
    config, plan = make_output(admission, tmp_path / "out", rows, rows_per_shard=4)
    for number, shard in enumerate(plan.shards):
        made = {"worker": f"cpu:here:{number}", "max_num_seqs": 4, "step_times": TIMES}
        commit(tmp_path / "out", plan, shard.name, config, answer, **made)
    return tmp_path / "out"


def at(part: Path, seconds: list[float], attempts: list[int] | None = None) -> None:
    """Let the rows of a part all begin at 100 s, and take so long."""
    table = pq.read_table(part)
    ends = pa.array([int((100 + s) * 1e6) for s in seconds], pa.timestamp("us", tz="UTC"))
    columns = {"finished_at": ends, "time_taken": pa.array(seconds)}
    if attempts:
        columns["attempt"] = pa.array(attempts, pa.int32())
    for name, values in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, values)
    pq.write_table(table, part)


def test_batch_fill_and_workers(output: Path) -> None:
    one, other = sorted((output / "data").iterdir())
    at(one, [4.0, 4.0, 4.0, 4.0])
    at(other, [2.0, 2.0, 1.0, 1.0])
    stats = read_stats(str(output))
    assert list(stats.workers) == ["cpu:here:0", "cpu:here:1"]
    assert stats.devices == {"cpu:here"}
    # 16 + 6 seconds of rows; 4 rows for 4 s and 4 rows for 2 s could have been.
    assert stats.batch_fill == pytest.approx(22 / 24)
    saved = stats.saved
    assert saved is not None
    assert saved.num_tokens == 8 * 4
    assert len(stats.footers) == 1, "what is of one worker tells no two kinds of parts apart"


def test_rows_of_an_earlier_try_are_by_another_worker(output: Path) -> None:
    one, other = sorted((output / "data").iterdir())
    at(one, [4.0, 4.0, 4.0, 4.0])
    at(other, [2.0, 2.0, 1.0, 1.0], attempts=[1, 2, 2, 1])
    workers = read_stats(str(output)).workers
    assert {name: w.spans.rows.tolist() for name, w in workers.items()} == {
        "cpu:here": [2.0, 1.0],
        "cpu:here:0": [4.0] * 4,
        "cpu:here:1": [2.0, 1.0],
    }
    assert workers["cpu:here"].max_num_seqs is None
    assert workers["cpu:here:1"].times == TIMES


def test_parts_that_name_no_worker(output: Path) -> None:
    for part in (output / "data").iterdir():
        table = pq.read_table(part)
        metadata = {b"quasar": b'{"shard": "%s"}' % part.stem.removeprefix("part-").encode()}
        pq.write_table(table.replace_schema_metadata(metadata), part)
    stats: RunStats = read_stats(str(output))
    assert list(stats.workers) == ["cpu:here"]
    assert stats.batch_fill is None
    assert stats.saved is None
