"""Rows that share answers: who points to whom, and that each is generated once."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.__main__ import main
from pipeline.admission import Admission, load_tokenizer
from pipeline.config import DataConfig, RunConfig
from pipeline.inspection import check_output
from pipeline.parts import part_uri
from pipeline.plan import Plan
from pipeline.shards import check_shard, read_shard
from tests.outputs import answer, fail, make_plan, write_jsonl
from tests.runs import Generate, read_rows, tokens_of
from tests.test_shard_worker import Engine, rows_of, run_worker, settings_for
from workers.config import SamplingParams
from workers.request import Completion

SHARING = DataConfig(share_duplicates=True)


@pytest.fixture(scope="module")
def admission(tiny_checkpoint: Path) -> Admission:
    tokenizer = load_tokenizer(tiny_checkpoint)
    return Admission(tokenizer, SamplingParams(temperature=1.0), 40, len(tokenizer), SHARING)


def some_rows(num_rows: int, seed: int = 0) -> list[dict[str, Any]]:
    """Few prompts and parameters, often the same; some rows cannot run."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for i in range(num_rows):
        row: dict[str, Any] = {"id": f"{seed}-{i}", "topic": i}
        if rng.random() < 0.9:
            row["prompt"] = rng.choice("abcdefgh")
        if rng.random() < 0.3:
            row["sampling_params"] = rng.choice([{"n": 2, "seed": 1}, {"seed": 1, "n": 2}, {}])
        rows.append(row)
    return rows


def kind_of(row: dict[str, Any]) -> str | None:
    """What rows must have in common to share answers."""
    if "prompt" not in row:
        return None
    return json.dumps([row["prompt"], row.get("sampling_params") or {}], sort_keys=True)


def planned(
    admission: Admission, folder: Path, rows: list[dict[str, Any]], rows_per_shard: int = 8
) -> Plan:
    uri = write_jsonl(folder / "in.jsonl", rows)
    return make_plan(admission, [uri], folder / "out", rows_per_shard=rows_per_shard)


class Dice(Engine):
    """Answers by the request's seed, as sampling does."""

    def __init__(self, deadly: str = "", failing: tuple[str, ...] = ()) -> None:
        super().__init__(deadly)
        self.failing = failing

    def step(self) -> list[Completion]:
        (done,) = super().step()
        if done.request.id in self.failing:
            return [fail(done.request)]
        number = done.request.seed % 1000 + done.request.sample_idx
        return [replace(answer(done.request), token_ids=(number,) * 5)]


def test_rows_point_to_the_first_of_their_kind(admission: Admission, tmp_path: Path) -> None:
    rows = some_rows(100) + some_rows(60, seed=1)
    uris = [
        write_jsonl(tmp_path / "a.jsonl", rows[:100]),
        write_jsonl(tmp_path / "b.jsonl", rows[100:]),
    ]
    output = tmp_path / "out"
    make_plan(admission, uris[:1], output, rows_per_shard=8)
    plan = make_plan(admission, uris, output, rows_per_shard=8)  # Files added later point, too.
    places = [(shard.name, i) for shard in plan.shards for i in range(shard.num_rows)]
    first: dict[str, tuple[str, int]] = {}
    at = iter(zip(rows, places, strict=True))
    for shard in plan.shards:
        assert check_shard(str(output), shard) == ""
        for planned_row in read_shard(str(output), shard.name).to_pylist():
            row, place = next(at)
            kind = kind_of(row)
            known = place if kind is None else first.setdefault(kind, place)
            expected = (None, None) if known == place else known
            assert (planned_row["first_shard"], planned_row["first_row"]) == expected
            assert (planned_row["prompt_digest"] is None) == (kind is None)


@pytest.mark.parametrize("at_once", [True, False])
def test_each_kind_is_generated_once(admission: Admission, tmp_path: Path, at_once: bool) -> None:
    rows = some_rows(120)
    plan, output = planned(admission, tmp_path, rows), tmp_path / "out"
    engine, names = Dice(), [shard.name for shard in plan.shards]
    reports: list[dict[str, Any]] = []
    for batch in [names] if at_once else [[name] for name in names]:
        reports += run_worker(engine, settings_for(output, plan), batch) or []
    kinds = {kind for row in rows if (kind := kind_of(row)) is not None}
    first_ids = {kind_of(row): row["id"] for row in reversed(rows)}
    asked = sum(2 if '"n": 2' in kind else 1 for kind in kinds)
    assert len(engine.answered) == asked
    config = RunConfig(model="m", input=("i",), output=str(output), data=SHARING)
    assert list(check_output(str(output), config, plan)) == []
    got = {key: row for name in names for key, row in rows_of(output, name).items()}
    by_id = {row["id"]: row for row in rows}
    for (row_id, sample_idx), row in got.items():
        kind = kind_of(by_id[row_id])
        assert row["topic"] == by_id[row_id]["topic"]
        if kind is None:
            assert (row["answer_of"], row["error_type"]) == (None, "NoPrompt")
            continue
        first = got[first_ids[kind], sample_idx]
        assert row["generated_tokens"] == first["generated_tokens"]
        assert (row["seed"], row["num_steps"]) == (first["seed"], first["num_steps"])
        assert row["answer_of"] == (None if first["id"] == row_id else first["id"])
    assert sum(r["num_shared"] for r in reports) == sum(bool(r["answer_of"]) for r in got.values())
    assert sum(r["num_generated_tokens"] for r in reports) == 5 * asked
    assert sum(r["stats"]["num_steps"] for r in reports) == 3 * asked


def test_what_is_not_there_yet_is_generated_with_the_same_seed(
    admission: Admission, tmp_path: Path
) -> None:
    rows = [{"id": f"r{i}", "prompt": "ab"[i % 2]} for i in range(24)]
    plan, output = planned(admission, tmp_path, rows), tmp_path / "out"
    first, second = plan.shards[:2]
    engine = Dice()
    assert run_worker(engine, settings_for(output, plan), [second.name]) is not None
    assert sorted(engine.answered) == ["r8", "r9"]
    assert run_worker(engine, settings_for(output, plan), [first.name]) is not None
    tokens = [
        {key[0]: row["generated_tokens"] for key, row in rows_of(output, shard.name).items()}
        for shard in (first, second)
    ]
    assert tokens[0]["r0"] == tokens[1]["r8"] == tokens[1]["r14"]
    assert tokens[0]["r1"] == tokens[1]["r9"] != tokens[0]["r0"]


def test_an_answer_that_failed_is_shared_and_tried_again(
    admission: Admission, tmp_path: Path
) -> None:
    rows = [{"id": f"r{i}", "prompt": "abc"[i % 3]} for i in range(24)]
    plan, output = planned(admission, tmp_path, rows), tmp_path / "out"
    names = [shard.name for shard in plan.shards]
    assert run_worker(Dice(failing=("r1",)), settings_for(output, plan), names) is not None
    got = {key[0]: row for name in names for key, row in rows_of(output, name).items()}
    failed = {f"r{i}" for i in range(1, 24, 3)}
    assert {row_id for row_id, row in got.items() if row["error"]} == failed
    engine = Dice()
    # The later shard first: what the earlier has is still the error, and is not taken.
    for name in reversed(names):
        retry = settings_for(output, plan, retry=True, run="again")
        assert run_worker(engine, retry, [name]) is not None
    again = {key[0]: row for name in names for key, row in rows_of(output, name).items()}
    assert {row_id for row_id, row in again.items() if row["error"]} == set()
    assert len({tuple(again[row_id]["generated_tokens"]) for row_id in failed}) == 1
    assert {k: v for k, v in again.items() if k not in failed} == {
        k: v for k, v in got.items() if k not in failed
    }


def test_a_row_that_kills_does_so_no_more_often_for_being_there_twice(
    admission: Admission, tmp_path: Path
) -> None:
    rows = [{"id": f"r{i}", "prompt": "abc"[i % 3]} for i in range(24)]
    plan, output = planned(admission, tmp_path, rows), tmp_path / "out"
    names, num_deaths = [shard.name for shard in plan.shards], 0
    while run_worker(Dice("r1"), settings_for(output, plan), names) is None:
        num_deaths += 1
        assert num_deaths < 10
    assert num_deaths == 3
    got = {key[0]: row for name in names for key, row in rows_of(output, name).items()}
    dead = {row_id for row_id, row in got.items() if row["error_type"] == "WorkerDied"}
    assert dead == {f"r{i}" for i in range(1, 24, 3)}
    assert len(got) == 24


def test_a_row_found_nowhere_that_kills_is_condemned(admission: Admission, tmp_path: Path) -> None:
    """Its first is in a part that cannot be read; every try looks there before."""
    rows = [{"id": f"r{i}", "prompt": "ab"[i % 2]} for i in range(24)]
    plan, output = planned(admission, tmp_path, rows), tmp_path / "out"
    Path(part_uri(str(output), plan.shards[0].name)).parent.mkdir()
    Path(part_uri(str(output), plan.shards[0].name)).write_bytes(b"cut off")
    name, num_deaths = plan.shards[1].name, 0
    while run_worker(Dice("r8"), settings_for(output, plan), [name]) is None:
        num_deaths += 1
        assert num_deaths < 10
    assert num_deaths == 3
    dead = {k[0] for k, row in rows_of(output, name).items() if row["error_type"] == "WorkerDied"}
    assert dead == {"r8", "r10", "r12", "r14"}


def test_digests_that_end_in_zeros_are_told_apart() -> None:
    """As numpy drops zeros at the end of a string."""
    digests = np.array([bytes(15) + b"\1", b"\1" + bytes(15), bytes(14) + b"\1\0"], "S16")
    assert len(np.unique(digests)) == 3


@pytest.mark.ray
def test_a_run_that_shares(
    generate: Generate,
    tiny_checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Sampled answers: the same with one worker and with two, and generated again alike."""
    rows = [{"id": f"r{i}", "prompt": "abcde"[i % 5] * 9, "topic": i} for i in range(60)]
    uri = write_jsonl(tmp_path / "in.jsonl", rows)
    given = ("--model", tiny_checkpoint, "--input", uri, "--temperature", 1, "--max-tokens", 12)
    given += ("--share-duplicates", "--data.rows_per_shard", 8)
    outputs = [tmp_path / "one", tmp_path / "two"]
    for num_workers, output in enumerate(outputs, start=1):
        assert generate(*given, "--output", output, "--num-workers", num_workers) == 0
    one, two = map(read_rows, outputs)
    assert tokens_of(one) == tokens_of(two)
    assert len({tuple(row["generated_tokens"]) for row in one.values()}) == 5
    assert sum(row["answer_of"] is None for row in one.values()) == 5
    assert "60 (60 samples, 0 errors, 55 shared)" in capsys.readouterr().out
    assert main(["verify", str(outputs[0]), "--replay", "1"]) == 0
    assert "60 samples generated again, 0 differ" in capsys.readouterr().out
    assert main(["status", str(outputs[0])]) == 0
    assert "60, 0 of them failed, 55 shared" in capsys.readouterr().out
    alone = tmp_path / "alone"
    assert (
        generate(*(flag for flag in given if flag != "--share-duplicates"), "--output", alone) == 0
    )
    assert len({tuple(row["generated_tokens"]) for row in read_rows(alone).values()}) > 50
    assert generate(*given, "--output", alone) == 2
    assert "data.share_duplicates was False, is True" in capsys.readouterr().err
