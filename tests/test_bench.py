"""The benchmark: its arms, its numbers, its tables, and a whole run on a tiny model."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from jobs.__main__ import main
from jobs.bench_table import format_bench
from jobs.cli import parse_bench
from jobs.experiment import arms
from jobs.prompts import Prompt, spread
from pipeline.config import BenchConfig, engine_config
from tests.conftest import run_jobs

NEEDED = ["--model", "m", "--input", "a.jsonl", "--output", "out"]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


class TestArms:
    def test_every_combination_once(self) -> None:
        config = BenchConfig.model_validate(
            {
                "model": "m",
                "input": "a",
                "output": "o",
                "batch_sizes": [1, 4],
                "drafts": ["none", "suffix:budget"],
                "temperatures": [0, 0.6, 1],
            }
        )
        found = [(a.precision, a.drafts, a.batch_size, a.temperature) for a in arms(config)]
        assert len(found) == len(set(found)) == 2 * 2 * 2 * 3

    def test_what_a_name_stands_for(self) -> None:
        assert engine_config("none", 5).num_spec_tokens == 0
        fixed = engine_config("ngram:3", 5, max_num_seqs=7)
        assert (fixed.proposer, fixed.num_spec_tokens, fixed.has_budget) == ("ngram", 3, False)
        assert fixed.max_num_seqs == 7
        budget = engine_config("suffix:budget", 9)
        assert (budget.proposer, budget.num_spec_tokens, budget.has_budget) == ("suffix", 9, True)

    @pytest.mark.parametrize(
        "name",
        ["ngram", "ngram:", "ngram:0", "ngram:x", "ngram:-1", "ngram:65", "none:3", "eagle:3"],
    )
    def test_names_that_stand_for_nothing(
        self, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["bench", *NEEDED, "--drafts", "none", name]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ")
        assert "drafts" in captured.err
        assert len(captured.err.splitlines()) == 1

    def test_lists_on_the_command_line(self) -> None:
        flags = ["--batch-sizes", "1", "8", "--temperatures=0", "0.6", "--precisions", "w8a8"]
        config = parse_bench([*NEEDED, *flags, "--drafts", "none", "--num-repeats", "2"])
        assert config.batch_sizes == (1, 8)
        assert config.temperatures == (0, 0.6)
        assert config.precisions == ("w8a8",)
        assert config.drafts == ("none",)
        assert config.num_repeats == 2
        assert parse_bench(NEEDED).batch_sizes == (1, 16)

    def test_prompts_are_spread_evenly(self) -> None:
        prompts = [Prompt("t", str(i), {}, (i,)) for i in range(10)]
        assert [p.where for p in spread(prompts, 4)] == ["0", "2", "5", "7"]
        assert spread(prompts, 99) == prompts


def run(
    repeat: int, drafts: str, rate: float, *, precision: str = "w8a8", batch: int = 1
) -> dict[str, Any]:
    """A record as the experiment writes it: 100 tokens, two tasks."""
    stats = {
        "num_steps": 50,
        "num_draft_tokens": 0,
        "histogram": [],
        "num_spec_steps": 0,
        "num_accepted_draft_tokens": 0,
        "mean_acceptance_length": None,
        "draft_acceptance_rate": None,
        "acceptance_by_position": [],
    }
    if drafts != "none":
        stats |= {
            "num_draft_tokens": 40,
            "histogram": [10, 10],
            "num_spec_steps": 20,
            "num_accepted_draft_tokens": 10,
            "mean_acceptance_length": 1.5,
            "draft_acceptance_rate": 0.25,
            "acceptance_by_position": [0.5],
        }
    seconds = 100 / rate
    phases = {"prefill": seconds / 2, "verify": seconds / 4, "draft": 0.0, "accept": 0.0}
    task = {"num_rows": 1, "num_tokens": 50, "row_seconds": seconds / 2, "stats": stats}
    return {
        "arm": {
            "precision": precision,
            "drafts": drafts,
            "batch_size": batch,
            "temperature": 0.0,
        },
        "repeat": repeat,
        "tokens_equal_first_arm": True,
        "seconds": seconds,
        "num_tokens": 100,
        "tokens_per_second": rate,
        "decode_tokens_per_second": 2 * rate,
        "phases": phases | {"host": seconds / 4},
        "stats": stats,
        "tasks": {"chat": task, "code": task},
    }


def report(runs: list[dict[str, Any]]) -> dict[str, Any]:
    record = {"pass": "decode, 1 rows", "raw_seconds": 0.001, "matrix_seconds": 0.002}
    return {
        "provenance": {
            "device": "a processor",
            "num_threads": 2,
            "time": "2026-11-30T00:00:00+00:00",
            "commit": "abc",
        },
        "config": {"model": "/models/tiny", "max_tokens": 5, "num_repeats": 3},
        "prompts": [{"task": "chat", "num_tokens": 7}, {"task": "code", "num_tokens": 8}],
        "roofline": [record | {"step_seconds": 0.004, "raw_of_matrix": 0.5, "raw_of_step": 0.25}],
        "samples": {
            "num_samples": 8,
            "prompt_tokens": 500,
            "answer_tokens": 64,
            "separate_seconds": 9.0,
            "shared_seconds": 3.0,
            "ratio": 2.9,
        },
        "runs": runs,
    }


def cells(table: str, *starts: str) -> list[str]:
    """The cells of the table row that begins with these cells."""
    begin = f"| {' | '.join(starts)} |"
    (line,) = [line for line in table.splitlines() if line.startswith(begin)]
    return [cell.strip() for cell in line.strip("|").split("|")][len(starts) :]


class TestTables:
    def test_speed_is_a_median_and_ratios_are_within_a_repeat(self) -> None:
        """The machine is twice as fast in the last repeat: the ratios do not notice."""
        plain = [run(i, "none", rate) for i, rate in enumerate([10, 11, 24])]
        drafted = [run(i, "ngram:5", rate) for i, rate in enumerate([15, 16.5, 36])]
        bf16 = [run(i, "none", rate, precision="bf16") for i, rate in enumerate([5, 5.5, 12])]
        speed = format_bench(report([*drafted, *bf16, *plain])).split("## ")[1]
        assert cells(speed, "0", "1", "w8a8", "ngram:5") == [
            *("16.5 (15.0 to 36.0)", "33.0", "1.50", "3.00", "", "yes")
        ]
        assert cells(speed, "0", "1", "w8a8", "none")[2:5] == ["1.00", "2.00", "2.00"]
        assert cells(speed, "0", "1", "bf16", "none")[2:5] == ["1.00", "1.00", ""]

    def test_tokens_that_differ_are_shouted(self) -> None:
        runs = [run(0, "none", 10), run(0, "ngram:5", 10) | {"tokens_equal_first_arm": False}]
        assert (
            cells(format_bench(report(runs)).split("## ")[1], "0", "1", "w8a8", "ngram:5")[-1]
            == "NO"
        )

    def test_time_acceptance_tasks_and_roofline(self) -> None:
        table = format_bench(report([run(0, "none", 10), run(0, "ngram:5", 20)]))
        _, _, phases, acceptance, tasks, roofline, samples = table.split("## ")
        assert cells(phases, "0", "1", "w8a8", "none") == [
            *("10.0", "50.0%", "25.0%", "0.0%", "0.0%", "25.0%")
        ]
        assert cells(acceptance, "0", "1", "w8a8", "ngram:5") == [
            *("2.00", "40%", "1.50", "25%", "0.50")
        ]
        assert "none" not in acceptance
        assert cells(tasks, "0", "w8a8", "ngram:5") == ["20.0 (2.00)", "20.0 (2.00)"]
        assert "3.0 s; as many separate prompts: 9.0 s, 2.90 times" in samples
        assert cells(roofline, "decode, 1 rows") == ["1.0", "2.0", "4.0", "50%", "25%"]

    def test_rows_that_share_their_time_have_no_speed_of_their_own(self) -> None:
        table = format_bench(report([run(0, "none", 10, batch=16)]))
        assert "By task" not in table


def test_a_whole_run(tiny_checkpoint: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"one two three {i} " * 6, "task": f"t{i % 2}"} for i in range(8)]
    write_rows(tmp_path / "in.jsonl", rows)
    flags = [
        *("--model", str(tiny_checkpoint), "--recipe", "rtn", "--input", "in.jsonl"),
        *("--output", "out", "--num-prompts", "4", "--max-tokens", "12", "--num-repeats", "2"),
        *("--batch-sizes", "1", "3", "--temperatures", "0", "0.6"),
        *("--drafts", "none", "ngram:3", "suffix:budget"),
    ]
    result = run_jobs("bench", *flags, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    made = json.loads((tmp_path / "out" / "bench.json").read_text(encoding="utf-8"))
    assert len(made["runs"]) == 2 * 2 * 2 * 2 * 3
    for record in made["runs"]:
        assert record["tokens_equal_first_arm"]
        assert 4 <= record["num_tokens"] <= 4 * 12
        assert sum(record["phases"].values()) <= record["seconds"]
        assert record["num_tokens"] == sum(t["num_tokens"] for t in record["tasks"].values())
        drafted = record["stats"]["num_draft_tokens"]
        assert drafted == 0 or record["arm"]["drafts"] != "none"
    by_drafts = {record["arm"]["drafts"]: record["stats"] for record in made["runs"]}
    assert by_drafts["ngram:3"]["num_draft_tokens"] > 0
    assert {row["pass"] for row in made["roofline"]} >= {"decode, 16 rows", "prefill, 1000 tokens"}
    assert (
        made["samples"]["ratio"] > 0
    )  # How much it is, the benchmark tells; a busy machine may not.
    assert set(made["step_times"]) == {"bf16", "w8a8"}
    table = (tmp_path / "out" / "bench.md").read_text(encoding="utf-8")
    assert table.strip() in result.stdout
    assert "| 0.6 | 3 | w8a8 | suffix:budget |" in table
    again = run_jobs("bench", *flags, cwd=tmp_path)
    assert again.returncode == 2
    assert "not empty" in again.stderr


def test_a_checkpoint_found_damaged_when_it_is_read(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, model)
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = math.nan
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    write_rows(tmp_path / "in.jsonl", [{"prompt": "a b"}])
    flags = ["--model", "model", "--recipe", "rtn", "--input", "in.jsonl", "--output", "out"]
    result = run_jobs("bench", *flags, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert f"{name} holds NaN" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--input", "none.jsonl"], ["none.jsonl", "no such file"]),
        (["--input", "empty.jsonl"], ["empty.jsonl", "no prompts"]),
        (["--input", "bad.jsonl"], ["bad.jsonl: line 2", "bad JSON"]),
        (["--input", "long.jsonl"], ["long.jsonl: line 1", "tokens"]),
        (["--input", "in.jsonl", "--output", "file"], ["output file", "a file"]),
        (["--input", "in.jsonl", "--output", "s3://b/o"], ["s3://b/o", "this machine"]),
        (["--input", "in.jsonl", "--batch-sizes", "0"], ["batch_sizes"]),
        (["--input", "in.jsonl", "--temperatures", "-1"], ["temperatures"]),
        (["--input", "in.jsonl", "--precisions", "int4"], ["precisions"]),
        (["--input", "in.jsonl", "--speed", "9"], ["speed"]),
    ],
)
def test_what_cannot_be_measured_is_refused(
    flags: list[str],
    words: list[str],
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_rows(tmp_path / "in.jsonl", [{"prompt": "a b"}])
    write_rows(tmp_path / "long.jsonl", [{"prompt": "a b " * 400}])
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt"', encoding="utf-8")
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert main(["bench", "--model", str(tiny_checkpoint), "--output", "out", *flags]) == 2
    line = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(line) == 1
    assert all(word in line[0] for word in words), line
    assert sorted(tmp_path.iterdir()) == before
