"""How a run says how it is doing: in its file, on a terminal, in a log."""

import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jobs import live, status
from jobs.__main__ import main
from pipeline import progress as progress_module
from pipeline.lease import Lease
from pipeline.places import Place
from pipeline.progress import Course, Progress, Watch, WorkerProgress, read_progress
from pipeline.shard_worker import WorkerState
from pipeline.summary import Summary
from workers.stats import AcceptanceStats

RUNNING = Progress(
    at=1.0,
    phase="generating",
    num_rows=250,
    num_rows_planned=1000,
    num_samples=260,
    num_errors=3,
    num_generated_tokens=12_345,
    tokens_per_second=678.9,
    mean_acceptance_length=2.25,
    draft_acceptance_rate=0.5,
    seconds_left=90.0,
    num_starting=2,
    workers=(WorkerProgress("cpu:host:17", 3, 16, 5, 999, 4),),
)


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_module.time, "time", clock.time)
    return clock


def worker(name: str = "cpu:host:1", **counts: int) -> Place:
    place = Place(0, actor=name)
    place.is_ready = True
    place.state = WorkerState(name, counts)
    return place


def test_before_anything_is_planned() -> None:
    seen = Course().look()
    assert (seen.phase, seen.num_rows_planned, seen.seconds_left) == ("planning", None, None)


def test_what_is_under_way_counts(clock: Clock) -> None:
    place = worker(num_samples=10, num_tokens=100, num_rows=4, num_slots=16, num_waiting=7)
    before = Summary(num_rows=50, num_samples=50, num_generated_tokens=500)
    course = Course("starting", 200, before, before, [place, Place(0)])
    first = course.look()
    assert first.phase == "generating"
    assert (first.num_rows, first.num_samples, first.num_generated_tokens) == (50, 60, 600)
    assert (first.num_starting, first.seconds_left) == (1, None)
    assert first.workers == (WorkerProgress("cpu:host:1", 4, 16, 7, 100, 0),)

    clock.now += 10
    place.state = WorkerState("cpu:host:1", {"num_samples": 30, "num_tokens": 400})
    second = course.look()
    assert second.num_samples == 80
    assert second.tokens_per_second == 30.0  # 300 tokens in 10 s.
    assert second.seconds_left == 60.0  # 120 samples at 2 a second.


def test_a_worker_that_was_replaced_goes_on_counting(clock: Clock) -> None:
    place = worker(num_samples=10, num_tokens=100)
    course = Course("generating", 100, places=[place])
    course.look()
    place.reset("another actor")
    place.state = WorkerState("cpu:host:2", {"num_samples": 2, "num_tokens": 20})
    assert course.look().num_generated_tokens == 120


def test_acceptance_is_told_before_the_first_part(clock: Clock) -> None:
    counts = {"num_spec_steps": 4, "num_draft_tokens": 12, "num_accepted_draft_tokens": 6}
    course = Course("generating", 100, places=[worker(num_tokens=10, **counts)])
    assert course.look().mean_acceptance_length == 2.5
    assert course.look().draft_acceptance_rate == 0.5
    course.total = Summary(stats=AcceptanceStats(10, 4, (1, 1)))
    assert course.look().mean_acceptance_length == 1.5


def test_at_the_end_the_parts_are_the_truth(clock: Clock) -> None:
    before = Summary(num_generated_tokens=7, spans=((0.0, 5.0),))
    places = [worker(num_samples=99, num_tokens=999)]
    course = Course("generating", 10, before, before, places)
    course.look()
    course.phase = "complete"
    course.total = Summary(
        num_rows=10, num_samples=10, num_generated_tokens=77, spans=((0.0, 5.0), (20.0, 30.0))
    )
    end = course.look()
    assert (end.num_samples, end.num_generated_tokens, end.workers) == (10, 77, ())
    assert end.tokens_per_second == 7.0  # 70 of them in 10 s of this run.


def test_the_file_says_what_was_seen(tmp_path: Path) -> None:
    seen: list[Progress] = []
    course = Course("starting", 7)
    with Watch(str(tmp_path), course, seen.append):
        while not seen:
            time.sleep(0.01)
        assert read_progress(str(tmp_path)) == seen[0]
        course.phase = "complete"
    assert [p.phase for p in (seen[0], seen[-1])] == ["starting", "complete"]
    assert read_progress(str(tmp_path)) == seen[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]


def test_a_run_that_ends_early_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Watch(str(tmp_path), Course(), lambda _: None):
        raise ZeroDivisionError
    there = read_progress(str(tmp_path))
    assert there is not None
    assert there.phase == "stopped"


def test_a_file_that_cannot_be_written_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "progress.json").mkdir()
    with Watch(str(tmp_path), Course(), lambda _: None):
        pass
    assert caplog.text.count("cannot be written") == 1


@pytest.mark.parametrize("content", [b"", b"[]", b'{"at": 1}', b'{"workers": 3}', b"\xff"])
def test_a_file_of_another_make_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "progress.json").write_bytes(content)
    assert read_progress(str(tmp_path)) is None


def test_json_and_back() -> None:
    assert Progress.from_json(RUNNING.to_json().encode()) == RUNNING
    assert json.loads(RUNNING.to_line())["workers"] == 1


@pytest.mark.parametrize("width", [60, 120])
def test_the_live_view(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(live.render(RUNNING))
    text = console.export_text()
    for shown in ("250 of 1,000 rows", "25.0%", "0:01:30 left", "679", "12,345", "2.25", "50%"):
        assert shown in text, text
    for shown in ("cpu:host:17", "3 of 16", "999", "2 starting", "generating"):
        assert shown in text, text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width


def test_many_workers_are_not_all_shown() -> None:
    many = tuple(replace(RUNNING.workers[0], name=f"cpu:h:{i}") for i in range(40))
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(live.render(replace(RUNNING, workers=many)))
    text = console.export_text()
    assert "and 28 more" in text
    assert "cpu:h:12" not in text


def test_a_log_gets_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "_LINE_SECONDS", 0.0)
    with live.showing() as show:
        show(RUNNING)
    monkeypatch.setattr(live, "_LINE_SECONDS", 1000.0)
    with live.showing() as show:
        show(RUNNING)
        show(replace(RUNNING, phase="complete"))
    lines = [json.loads(line)["phase"] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["generating", "complete"]


def write(output: Path, progress: Progress) -> None:
    (output / "progress.json").write_text(progress.to_json(), encoding="utf-8")


@pytest.mark.parametrize(("phase", "code"), [("complete", 0), ("stopped", 4)])
def test_following_a_run_to_its_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    phase: Any,
    code: int,
) -> None:
    """It has just begun: the lease is there, and nothing else; then what an earlier run said."""
    lease = Lease(str(tmp_path)).__enter__()
    looks = [
        lambda: write(tmp_path, replace(RUNNING, phase="stopped")),
        lambda: write(tmp_path, RUNNING),
        lambda: write(tmp_path, replace(RUNNING, at=2.0, phase=phase)),
        lambda: lease.__exit__(None, None, None),
    ]
    monkeypatch.setattr(status.time, "sleep", lambda _: looks.pop(0)())
    assert main(["status", str(tmp_path), "--follow"]) == code
    assert looks == []
    assert json.loads(capsys.readouterr().err.splitlines()[-1])["phase"] == phase


def test_following_a_run_that_is_dead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, RUNNING)
    assert main(["status", str(tmp_path), "--follow"]) == 4
    assert "the run has died; `generate` goes on" in capsys.readouterr().err


def test_following_a_run_elsewhere_that_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, RUNNING)
    monkeypatch.setattr(status, "read_holder", lambda _: "process 7 on another machine")
    monkeypatch.setattr(status, "STALE_SECONDS", 0.0)
    monkeypatch.setattr(status, "_PAUSE_SECONDS", 0.0)
    assert main(["status", str(tmp_path), "--follow"]) == 4
    assert "has not been heard of" in capsys.readouterr().err


def test_following_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path), "--follow"]) == 2
    assert "none that says how it is doing" in capsys.readouterr().err
