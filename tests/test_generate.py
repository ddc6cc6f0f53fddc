"""The main job on a local Ray: complete, repeatable however it is cut and drafted, and hard to kill."""

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import jobs.generate
import jobs.run
from jobs.__main__ import main
from jobs.cli import parse_run
from pipeline.errors import InputError
from tests.conftest import run_jobs
from tests.runs import (
    NUM_ROWS,
    Generate,
    Key,
    copy_plan,
    parts_of,
    read_rows,
    tokens_of,
)


@pytest.mark.ray
def test_the_command_from_files_to_parts(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """As a user types it: its own Ray, relative paths, some lines that cannot run."""
    lines = [
        json.dumps({"prompt": "one one one", "topic": "a"}),
        '{"prompt": "cut off',
        json.dumps({"messages": [{"role": "user", "content": "hi"}], "topic": "b"}),
        json.dumps({"topic": "no prompt"}),
        json.dumps({"prompt": "x" * 300, "topic": "too long"}),
        json.dumps({"prompt": "two", "sampling_params": {"n": 3, "temperature": 1.0}}),
        json.dumps({"prompt": "x", "sampling_params": {"temprature": 1.0}}),
        json.dumps({"prompt_token_ids": [1, 2, 3], "id": "ids"}),
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines), encoding="utf-8")
    pq.write_table(pa.table({"prompt": ["p"], "topic": ["parquet"]}), tmp_path / "in.parquet")
    given = ("--model", tiny_checkpoint, "--input", "in.jsonl", "in.parquet", "--output", "out")
    result = run_jobs("generate", *given, "--max-tokens", 12, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    rows = read_rows(tmp_path / "out")
    errors = {key: row["error_type"] for key, row in rows.items() if row["error"]}
    assert errors == {
        ("in.jsonl:2", 0): "BadRow",
        ("in.jsonl:4", 0): "NoPrompt",
        ("in.jsonl:5", 0): "PromptTooLong",
        ("in.jsonl:7", 0): "InvalidSamplingParams",
    }
    assert "in.jsonl: line 2: " in rows["in.jsonl:2", 0]["error"]
    answered = [("in.jsonl:1", 0), ("in.jsonl:3", 0), ("ids", 0), ("in.parquet:1", 0)]
    answered += [("in.jsonl:6", i) for i in range(3)]
    assert rows.keys() == {*errors, *answered}
    assert rows["in.parquet:1", 0]["topic"] == "parquet"
    assert len({tuple(rows["in.jsonl:6", i]["generated_tokens"]) for i in range(3)}) == 3
    check_summary(tmp_path / "out", rows, num_rows=9)
    check_config_is_the_same_run(tmp_path / "out")


def check_summary(output: Path, rows: dict[Key, dict[str, Any]], num_rows: int) -> None:
    summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))

    def total(name: str) -> int:
        return sum(row[name] or 0 for row in rows.values())

    assert summary["num_rows"] == num_rows
    assert summary["num_samples"] == len(rows)
    assert summary["num_errors"] == sum(bool(row["error"]) for row in rows.values())
    for name in ("num_generated_tokens", "num_steps", "num_spec_steps", "num_draft_tokens"):
        assert summary[name] == total(name), name
    assert summary["num_accepted_draft_tokens"] == total("num_accepted_draft_tokens")
    footers = [pq.read_metadata(part).metadata[b"quasar"] for part in parts_of(output)]
    for footer in map(json.loads, footers):
        assert footer["weights_digest"] == summary["weights_digest"]
        assert footer["config_digest"] == summary["config_digest"]
        assert footer["versions"].keys() >= {"torch", "ray", "python", "quasar-batch"}
        assert re.fullmatch(r"cpu:[^:]+:\d+", footer["worker"])
        assert footer["max_num_seqs"] >= 1


def check_config_is_the_same_run(output: Path) -> None:
    path = output / "config.yaml"
    config = parse_run(["--config", str(path)])
    assert config.model_dump(mode="json") == yaml.safe_load(path.read_text(encoding="utf-8"))
    summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    assert config.digest() == summary["config_digest"]


@pytest.mark.ray
def test_the_undisturbed_run_is_complete(undisturbed: Path) -> None:
    rows = read_rows(undisturbed)
    expected = {(f"r{i}", 0) for i in range(NUM_ROWS)} | {("refused", 0)}
    expected |= {(f"r{i}", 1) for i in range(3, NUM_ROWS, 8)}
    assert rows.keys() == expected
    assert [key for key, row in rows.items() if row["error"]] == [("refused", 0)]
    assert len(parts_of(undisturbed)) == 9  # 65 rows, 8 a shard.
    assert all(row["num_draft_tokens"] == 0 for row in rows.values() if not row["error"])
    assert all(row["logprobs"] for key, row in rows.items() if key[0] == "r3")
    assert all(row["attempt"] == 1 for row in rows.values())
    check_summary(undisturbed, rows, num_rows=NUM_ROWS + 1)


@pytest.mark.ray
def test_workers_batches_drafts_and_shards_change_no_token(
    generate: Generate,
    flags: tuple[Any, ...],
    undisturbed: Path,
    tmp_path: Path,
) -> None:
    """Everything at once against the plainest run; greedy and sampled rows are in both."""
    output = tmp_path / "out"
    given = ("--proposer", "ngram", "--num-speculative-tokens", 4, "--max-num-seqs", 16)
    shards = ("--num-workers", 2, "--data.rows_per_shard", 256)
    assert generate(*flags, "--output", output, *given, *shards) == 0
    rows, expected = read_rows(output), read_rows(undisturbed)
    assert len(parts_of(output)) < len(parts_of(undisturbed))
    assert tokens_of(rows) == tokens_of(expected)
    for key, row in rows.items():
        assert row["cumulative_logprob"] == pytest.approx(expected[key]["cumulative_logprob"])
    assert sum(row["num_accepted_draft_tokens"] or 0 for row in rows.values()) > 0
    assert any(row["num_accepted_draft_tokens"] == 0 for row in rows.values())


class Killer(threading.Thread):
    """Kills the actors with SIGKILL once a part is committed and others are under way."""

    def __init__(self, output: Path) -> None:
        super().__init__(daemon=True)
        self._output, self._since = output, time.time()
        self.num_killed = 0

    def actors(self) -> list[dict[str, Any]]:
        """The shard actors of this run."""
        from ray._private.state import actors

        since = self._since * 1000
        return [
            actor
            for actor in actors().values()
            if "ShardWorker" in actor["ActorClassName"] and actor["StartTime"] >= since
        ]

    def run(self) -> None:
        deadline = time.monotonic() + 100
        alive: list[int] = []
        while not self.num_killed and time.monotonic() < deadline:
            time.sleep(0.01)
            has_parts = bool(parts_of(self._output))
            if not has_parts or not alive:  # Asking takes a while: a small job would be over.
                alive = [actor["Pid"] for actor in self.actors() if actor["State"] == "ALIVE"]
            if has_parts and alive:  # All of them: one alone may have done its share by now.
                for pid in alive:
                    os.kill(pid, signal.SIGKILL)
                self.num_killed = len(alive)

    def num_conversions(self) -> int:
        """Executions of the conversion task since the start, from Ray's own record."""
        import ray

        def count() -> int:
            return sum(
                event["cat"] == "task::convert" and event["ts"] >= self._since * 1e6
                for event in ray.timeline()
            )

        deadline = time.monotonic() + 20
        while not count() and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(1.5)  # Processes report once a second: a second conversion would be there too.
        return count()


@pytest.mark.ray
def test_an_actor_killed_half_way_changes_nothing(
    generate: Generate, flags: tuple[Any, ...], undisturbed: Path, tmp_path: Path
) -> None:
    output = copy_plan(undisturbed, tmp_path / "out", lambda _: False)
    shutil.rmtree(output / "attempts")
    killer = Killer(output)
    killer.start()
    given = ("--num-workers", 2, "--proposer", "ngram", "--max-num-seqs", 1)  # Slow, so that
    assert generate(*flags, "--output", output, *given) == 0  # work is under way.
    killer.join(5)
    assert killer.num_killed
    rows = read_rows(output)
    assert tokens_of(rows) == tokens_of(read_rows(undisturbed))
    attempts = Counter(row["attempt"] for row in rows.values())
    assert attempts[2] > 0, "no shard was under way when the actor was killed"
    assert attempts[1] > 0
    assert attempts.keys() == {1, 2}
    assert len(killer.actors()) == 2 + killer.num_killed, "each was replaced"
    assert killer.num_conversions() == 1


@pytest.mark.ray
def test_a_resumed_run_does_what_is_missing_and_nothing_else(
    generate: Generate, flags: tuple[Any, ...], undisturbed: Path, tmp_path: Path
) -> None:
    names = [part.name for part in parts_of(undisturbed)]
    missing = {names[2], names[7]}
    output = copy_plan(undisturbed, tmp_path / "out", lambda name: name not in missing)
    before = {part.name: part.stat() for part in parts_of(output)}
    assert len(before) == len(names) - 2
    assert generate(*flags, "--output", output, "--proposer", "ngram") == 0
    after = {part.name: part.stat() for part in parts_of(output)}
    assert after.keys() == set(names)
    for name, stat in before.items():
        assert (after[name].st_mtime_ns, after[name].st_ino) == (stat.st_mtime_ns, stat.st_ino)
    rows = read_rows(output)
    assert tokens_of(rows) == tokens_of(read_rows(undisturbed))
    again = {key for key, row in rows.items() if row["attempt"] == 2}
    tables = [pq.read_table(output / "data" / name) for name in missing]
    assert again == {(r["id"], r["sample_idx"]) for t in tables for r in t.to_pylist()}
    check_summary(output, rows, num_rows=NUM_ROWS + 1)
    summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    assert summary["this_run"]["num_shards"] == 2


@pytest.mark.ray
def test_a_complete_run_is_left_alone(
    generate: Generate, flags: tuple[Any, ...], undisturbed: Path
) -> None:
    before = [part.stat().st_mtime_ns for part in parts_of(undisturbed)]
    assert generate(*flags, "--output", undisturbed) == 0
    assert [part.stat().st_mtime_ns for part in parts_of(undisturbed)] == before
    summary = json.loads((undisturbed / "summary.json").read_text(encoding="utf-8"))
    assert summary["this_run"]["num_shards"] == 0
    assert summary["num_rows"] == NUM_ROWS + 1


@pytest.mark.ray
def test_a_file_that_turns_out_damaged_is_one_line(
    generate: Generate,
    tiny_checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Found by an actor half-way through planning; the user sees the file's name, no traceback."""
    (tmp_path / "bad.jsonl.gz").write_bytes(b"no gz")
    given = ("--model", tiny_checkpoint, "--input", tmp_path / "bad.jsonl.gz")
    assert generate(*given, "--output", tmp_path / "out") == 2
    assert_one_line(capsys.readouterr().err, str(tmp_path / "bad.jsonl.gz"))
    assert not (tmp_path / "out" / "data").exists()


def assert_one_line(stderr: str, *named: str) -> None:
    """Beside those that say how the run is doing, where it took a while."""
    stderr = "".join(line for line in stderr.splitlines(keepends=True) if line[0] != "{")
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1, stderr
    for word in named:
        assert word in stderr


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `generate`, which must refuse, before Ray starts unless told otherwise."""
    starts: list[None] = []

    def unreachable(*_: Any, **__: Any) -> None:
        raise AssertionError("it went on")

    monkeypatch.setattr(jobs.generate, "start_ray", lambda: starts.append(None))
    monkeypatch.setattr(jobs.run, "convert_to_store", unreachable)

    def check(
        *arguments: Any, named: tuple[str, ...], ray_starts: bool = False, code: int = 2
    ) -> None:
        starts.clear()
        assert main(["generate", *map(str, arguments)]) == code
        assert bool(starts) == ray_starts
        captured = capsys.readouterr()
        assert captured.out == ""
        assert_one_line(captured.err, *named)

    return check


@pytest.fixture
def one_prompt(tmp_path: Path) -> Path:
    path = tmp_path / "one.jsonl"
    path.write_text('{"prompt": "a"}\n', encoding="utf-8")
    return path


def test_bad_input_is_refused_early(
    refused: Any, tiny_checkpoint: Path, one_prompt: Path, tmp_path: Path
) -> None:
    out, missing = tmp_path / "out", tmp_path / "missing.jsonl"
    rest = ("--input", one_prompt, "--output", out)
    good = ("--model", tiny_checkpoint, *rest)
    refused(*good, "--input", missing, named=(str(missing), "no such file"))
    refused(*good, "--temperature", -1, named=("sampling.temperature", "-1"))
    refused(*good, "--sampling.topk", 4, named=("--sampling.topk",))
    refused("--model", tmp_path / "none", *rest, named=(str(tmp_path / "none"), "no such folder"))
    refused("--model", one_prompt, *rest, named=(str(one_prompt), "file"))
    (tmp_path / "empty").mkdir()
    empty = tmp_path / "empty"
    refused("--model", empty, *rest, named=(str(empty), "config.json"), ray_starts=True)
    table = tmp_path / "a.xlsx"
    table.write_text("prompt\n", encoding="utf-8")
    refused(*good, "--input", table, named=(str(table), ".parquet"))
    assert not out.exists()


def test_a_model_without_tokenizer_is_refused(
    refused: Any, tiny_checkpoint: Path, one_prompt: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, model, ignore=shutil.ignore_patterns("tokenizer*"))
    rest = ("--input", one_prompt, "--output", tmp_path / "out")
    refused("--model", model, *rest, named=(str(model), "tokenizer"), ray_starts=True)


def test_a_relative_output_inside_a_ray_job_is_refused(
    refused: Any, tiny_checkpoint: Path, one_prompt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    given = ("--model", tiny_checkpoint, "--input", one_prompt)
    refused(*given, "--output", "out/here", named=("out/here", "relative", "absolute"))


def test_another_configuration_or_a_foreign_folder_is_refused(
    refused: Any, tiny_checkpoint: Path, one_prompt: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    good = ("--model", tiny_checkpoint, "--input", one_prompt, "--output", out)
    config = parse_run([str(argument) for argument in good])
    (out / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    (out / "plan").mkdir()
    (out / "plan" / "plan.json").write_text("{}", encoding="utf-8")
    refused(*good, "--temperature", 0.5, named=("sampling.temperature", "0.0", "0.5", str(out)))
    refused(*good, "--data.rows_per_shard", 9, named=("data.rows_per_shard",))
    refused(*good, "--seed", 1, named=("seed was 0, is 1",))
    for text in ("- a", "model: m\n", "a: [", ""):
        (out / "config.yaml").write_text(text, encoding="utf-8")
        refused(*good, named=(str(out), "config.yaml", "is damaged; put a copy"), code=4)
    (out / "config.yaml").unlink()
    shutil.rmtree(out / "plan")
    (out / "thesis.txt").write_text("ten years of work", encoding="utf-8")
    refused(*good, named=(str(out), "not empty"))
    assert [p.name for p in out.iterdir()] == ["thesis.txt"]
    refused(*good, "--output", out / "thesis.txt", named=("thesis.txt", "file"))


@pytest.mark.parametrize(
    ("gpus", "workers", "named"),
    [(0, 1, "no node has room for a cuda worker"), (1, 2, "need 2 GPU, and Ray")],
)
def test_gpus_that_are_not_there_are_not_waited_for(
    refused: Any,
    tiny_checkpoint: Path,
    one_prompt: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    workers: int,
    named: str,
) -> None:
    node = {"Alive": True, "NodeManagerHostname": "here"}
    resources = {"CPU": 2.0, "GPU": float(gpus)} if gpus else {"CPU": 2.0}
    monkeypatch.setattr("ray.nodes", lambda: [node | {"Resources": resources}])
    monkeypatch.setattr(jobs.nodes.state.state, "get_cluster_config", lambda: None)
    rest = ("--input", one_prompt, "--output", tmp_path / "out", "--num-workers", workers)
    given = ("--model", tiny_checkpoint, *rest, "--cluster.device", "cuda")
    refused(*given, named=("cluster: ", named), ray_starts=True)


def test_a_refused_run_does_not_claim_its_folder(
    tiny_checkpoint: Path, one_prompt: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    given = ("--model", tiny_checkpoint, "--input", one_prompt, "--output", out)
    config = parse_run([str(argument) for argument in given])
    (out / "plan").mkdir(parents=True)
    (out / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    (out / "plan" / "shard-00000-00000.parquet").write_bytes(b"of a plan that was never whole")
    other = parse_run([*map(str, given), "--seed", "1"])
    jobs.generate.check_output(other)
    (out / "data").mkdir()
    (out / "data" / "part-00000-00000.parquet").write_bytes(b"an answer")
    with pytest.raises(InputError, match="seed was 0, is 1"):
        jobs.generate.check_output(other)


def test_an_output_that_cannot_be_is_refused_early(
    refused: Any, tiny_checkpoint: Path, one_prompt: Path
) -> None:
    below_a_file = one_prompt / "out"
    given = ("--model", tiny_checkpoint, "--input", one_prompt)
    refused(*given, "--output", below_a_file, named=(str(below_a_file), "cannot be written"))


@pytest.mark.parametrize("flag", ["--input", "--output"])
def test_a_store_without_credentials_is_one_line(
    refused: Any,
    tiny_checkpoint: Path,
    one_prompt: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flag: str,
) -> None:
    """smart-open's client raises errors of its own."""

    def no_credentials(uri: str, _mode: str) -> None:
        raise LookupError(f"no credentials for {uri}")

    monkeypatch.setattr("pipeline.storage.smart_open.open", no_credentials)
    given = {"--model": tiny_checkpoint, "--input": one_prompt, "--output": tmp_path / "out"}
    given[flag] = "s3://bucket/x.jsonl"
    arguments = [part for pair in given.items() for part in pair]
    refused(*arguments, named=("s3://bucket/x.jsonl", "no credentials"))


def test_ctrl_c_is_one_line_and_exit_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_arguments: Sequence[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs.generate, "generate", interrupted)
    assert main(["generate"]) == 4
    assert capsys.readouterr().err == "interrupted; the same command goes on from here\n"


def test_the_process_says_one_line_and_exits_2(tmp_path: Path) -> None:
    """The same from outside: nothing else on the terminal, no traceback."""
    given = ("--model", tmp_path, "--input", "no/such.jsonl", "--output", tmp_path / "out")
    result: subprocess.CompletedProcess[str] = run_jobs("generate", *given)
    assert result.returncode == 2
    assert result.stdout == ""
    assert_one_line(result.stderr, "no/such.jsonl")


def write_lines(path: Path, *lines: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.ray
def test_a_folder_that_grows(
    generate: Generate,
    tiny_checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Files that came since the first run add parts; what is done stays as it is."""
    folder, output = tmp_path / "in", tmp_path / "out"
    write_lines(folder / "b.csv", "question,score", "what,1", "who,")
    write_lines(folder / "notes.md", "not a prompt file")
    given = ("--model", tiny_checkpoint, "--input", folder, "--output", output)
    given += ("--prompt-column", "question", "--prompt-template", "Q: {{ prompt }}\nA:")
    given += ("--max-tokens", 4, "--sampling.ignore_eos")
    assert generate(*given, "--resume", "always") == 2
    assert "holds no run to go on with" in capsys.readouterr().err
    assert generate(*given, "--resume", "never") == 0
    assert "not read, as their format is none of ours" in capsys.readouterr().err
    before = read_rows(output)
    asked = [before[f"b.csv:{line}", 0]["prompt"] for line in (2, 3)]
    assert asked == ["Q: what\nA:", "Q: who\nA:"]
    assert [row["question"] for row in before.values()] == ["what", "who"]
    assert [row["score"] for row in before.values()] == ["1", None]

    (part,) = parts_of(output)
    content = part.read_bytes()
    write_lines(folder / "a.tsv", "score\tquestion", "3\twhere")
    assert generate(*given, "--resume", "never") == 2
    assert "is not empty (--resume never)" in capsys.readouterr().err
    for _ in range(2):
        assert generate(*given, "--resume", "always") == 0
        assert part.read_bytes() == content
        rows = read_rows(output)
        assert {key: row for key, row in rows.items() if key in before} == before
        assert rows["a.tsv:2", 0]["prompt"] == "Q: where\nA:"
        assert len(rows) == 3
    summary = json.loads((output / "summary.json").read_bytes())
    assert summary["weights"]["recipe"] == "rtn"  # Though nothing was left to do the last time.
    with (folder / "b.csv").open("a", encoding="utf-8") as file:
        file.write("why,2\n")
    capsys.readouterr()
    assert generate(*given) == 0
    assert "b.csv: was changed since it was planned" in capsys.readouterr().err
    (folder / "a.tsv").rename(tmp_path / "a.tsv")  # What is planned of it is enough.
    assert generate(*given[:3], folder / "b.csv", folder / "a.tsv", *given[4:]) == 0
    (tmp_path / "a.tsv").rename(folder / "a.tsv")
    assert generate(*given, "--temperature", 1) == 2
    assert "sampling.temperature was 0.0, is 1.0" in capsys.readouterr().err
    (output / "plan" / "plan.json").unlink()
    assert generate(*given) == 4
    assert "has parts, and the plan that they belong to" in capsys.readouterr().err


@pytest.mark.ray
def test_another_model_or_template_in_the_same_place_is_refused(
    generate: Generate,
    tiny_checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, output = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_checkpoint, model)
    prompts = write_lines(tmp_path / "a.txt", "a prompt")
    given = ("--input", prompts, "--output", output, "--max-tokens", 2)
    assert generate("--model", model, *given) == 0
    moved = model.rename(tmp_path / "moved")
    assert generate("--model", moved, *given) == 0  # It counts by its content.
    template = moved / "chat_template.jinja"
    before = template.read_bytes() if template.exists() else None
    template.write_text("{{ messages[0].content }}", encoding="utf-8")
    capsys.readouterr()
    assert generate("--model", moved, *given) == 2
    assert "made with something else (tokenizer was" in capsys.readouterr().err
    if before is None:
        template.unlink()
    else:
        template.write_bytes(before)
    config = json.loads((moved / "config.json").read_text(encoding="utf-8"))
    config["rms_norm_eps"] = 0.1
    (moved / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert generate("--model", moved, *given) == 2
    assert "made with something else (weights was" in capsys.readouterr().err
