"""Tries at a shard: rows that were under way when their worker died are tried in ever smaller groups."""

import json
from pathlib import Path

import pytest

from pipeline.attempts import Attempts

ROWS = list(range(40))


def begin(folder: Path, run: str = "r", *, forgive: bool = False) -> Attempts:
    return Attempts.begin(str(folder), "s", run, forgive=forgive)


def test_tries_are_counted_for_each_shard(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        attempts = begin(tmp_path)
        attempts.start([])
        assert attempts.number == number
    assert Attempts.begin(str(tmp_path), "other", "r").number == 1


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"attempt": 1, "run": "r"}'])
def test_what_is_damaged_is_told_and_begun_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    begin(tmp_path).start(ROWS)
    (tmp_path / "attempts" / "s.json").write_bytes(content)
    attempts = begin(tmp_path)
    assert (attempts.number, attempts.deaths) == (2, {})
    assert "s.json: is damaged" in caplog.text


def test_nothing_known_is_one_group(tmp_path: Path) -> None:
    assert begin(tmp_path).groups(ROWS) == [ROWS]
    assert begin(tmp_path).groups([]) == [[]]


def test_a_row_that_kills_is_found_with_three_deaths(tmp_path: Path) -> None:
    """What a worker does, played through: it dies whenever row 21 is under way."""
    deadly, num_deaths, answered = 21, 0, []
    for _ in range(10):
        attempts = begin(tmp_path)
        condemned = attempts.condemned(ROWS, 3)
        answered = []
        for group in attempts.groups([row for row in ROWS if row not in condemned]):
            attempts.start(group)
            if deadly in group:
                num_deaths += 1
                break
            answered += group
        else:
            break
    assert condemned == [deadly]
    assert num_deaths == 3
    assert sorted(answered) == [row for row in ROWS if row != deadly]
    assert attempts.deaths[deadly] == 3


def test_the_others_stay_in_groups(tmp_path: Path) -> None:
    begin(tmp_path).start(ROWS)
    second = begin(tmp_path)
    assert [len(group) for group in second.groups(ROWS)] == [0, 16, 16, 8]
    second.start(second.groups(ROWS)[2])
    sizes = [len(group) for group in begin(tmp_path).groups(ROWS)]
    assert sizes == [0, 16, 8, *[1] * 16]  # Those that died twice come last, each alone.


def test_rows_that_are_new_to_a_death_come_first_and_together(tmp_path: Path) -> None:
    begin(tmp_path).start([3, 4])
    assert begin(tmp_path).groups([1, 2, 3, 4, 5]) == [[1, 2, 5], [3, 4]]


def test_the_end_of_a_run_is_held_against_no_row(tmp_path: Path) -> None:
    begin(tmp_path, "first").start(ROWS)
    attempts = begin(tmp_path, "second")
    assert attempts.number == 2
    assert attempts.groups(ROWS) == [ROWS]


def test_deaths_outlast_their_run(tmp_path: Path) -> None:
    begin(tmp_path, "first").start(ROWS)
    begin(tmp_path, "first").start([])
    assert len(begin(tmp_path, "second").groups(ROWS)) == 4


def test_a_row_is_given_up_only_after_it_died_alone(tmp_path: Path) -> None:
    for _ in range(5):
        begin(tmp_path).start([1, 2])
    assert begin(tmp_path).condemned([1, 2], 1) == []
    begin(tmp_path).start([1])
    assert begin(tmp_path).condemned([1, 2], 3) == [1]
    assert begin(tmp_path).condemned([1, 2], 100) == []


def test_a_retry_forgives(tmp_path: Path) -> None:
    for _ in range(4):
        begin(tmp_path, "first").start([1])
    attempts = begin(tmp_path, "retry", forgive=True)
    assert (attempts.number, attempts.deaths, attempts.alone) == (5, {}, set())
    for _ in range(3):  # But not what happens in it: no retry is endless.
        attempts.start([1])
        attempts = begin(tmp_path, "retry", forgive=True)
    assert attempts.condemned([1], 3) == [1]


def test_what_is_written_down(tmp_path: Path) -> None:
    begin(tmp_path).start([7])
    begin(tmp_path).start([8])
    assert json.loads((tmp_path / "attempts" / "s.json").read_bytes()) == {
        "attempt": 2,
        "run": "r",
        "running": [8],
        "deaths": [[7, 1]],
        "alone": [7],
    }
