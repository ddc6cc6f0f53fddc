"""Processes that die at the worst moments: the output is that of a run without faults."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from jobs.__main__ import main
from pipeline.failpoints import VARIABLE
from tests.conftest import ROOT, clean_environment
from tests.runs import Generate, copy_plan, parts_of, read_rows, tokens_of

pytestmark = pytest.mark.ray


@pytest.fixture
def cluster(ray_session: None) -> dict[str, str]:
    """The environment of a driver that joins the tests' Ray."""
    import ray

    return clean_environment(RAY_ADDRESS=ray.get_runtime_context().gcs_address)


def drive(environment: dict[str, str], *arguments: object) -> subprocess.Popen[str]:
    """`generate` in a process of its own."""
    command = [sys.executable, "-m", "jobs", "generate", "--recipe", "rtn", *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def fresh(undisturbed: Path, tmp_path: Path) -> Path:
    """A run that is planned, and of whose parts none is made."""
    output = copy_plan(undisturbed, tmp_path / "out", lambda _: False)
    for name in ("attempts", "errors"):
        shutil.rmtree(output / name)
    (output / "manifest.json").unlink()
    return output


@pytest.mark.parametrize("place", ["plan", "part-listed", "manifest"])
def test_a_driver_that_dies(
    generate: Generate,
    flags: tuple[Any, ...],
    undisturbed: Path,
    tmp_path: Path,
    cluster: dict[str, str],
    place: str,
) -> None:
    """While it plans, before it says that the plan is whole, around the manifest."""
    output = tmp_path / "out"
    driver = drive(cluster | {VARIABLE: place}, *flags, "--output", output)
    _, err = driver.communicate(timeout=120)
    assert driver.returncode == -signal.SIGKILL, err
    assert (output / "lease.json").exists()
    before = {part: part.read_bytes() for part in parts_of(output)}
    assert generate(*flags, "--output", output, "--resume", "always") == 0
    assert tokens_of(read_rows(output)) == tokens_of(read_rows(undisturbed))
    assert {part: part.read_bytes() for part in before} == before
    assert main(["verify", str(output)]) == 0


@pytest.mark.parametrize(
    ("num_workers", "place"),
    [
        (1, "worker-start*2"),
        (1, "row=r21*1"),
        (1, "aside=part-00000-00003.parquet*1"),
        (2, "row=r0*1"),
        (2, "row=r63*2"),
        (2, "part-placed*2"),
    ],
)
def test_a_worker_that_dies(
    generate: Generate,
    flags: tuple[Any, ...],
    undisturbed: Path,
    fresh: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    num_workers: int,
) -> None:
    monkeypatch.setenv(VARIABLE, f"{place}:{tmp_path / 'counter'}")
    assert generate(*flags, "--output", fresh, "--num-workers", num_workers) == 0
    assert (tmp_path / "counter").stat().st_size == int(place[-1]), "nobody died"
    rows = read_rows(fresh)
    assert tokens_of(rows) == tokens_of(read_rows(undisturbed))
    assert [path.name for path in (fresh / "data").iterdir() if path.suffix != ".parquet"] == []
    assert main(["verify", str(fresh)]) == 0


def test_a_row_that_always_kills_its_worker(
    generate: Generate,
    flags: tuple[Any, ...],
    undisturbed: Path,
    fresh: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(VARIABLE, "row=r11")
    assert generate(*flags, "--output", fresh) == 0
    rows, expected = read_rows(fresh), read_rows(undisturbed)
    dead = {key for key, row in rows.items() if row["error_type"] == "WorkerDied"}
    assert dead == {("r11", 0), ("r11", 1)}
    rest = {key: row for key, row in tokens_of(rows).items() if key not in dead}
    assert rest == {k: row for k, row in tokens_of(expected).items() if k not in dead}
    monkeypatch.delenv(VARIABLE)  # The fault is mended; the row is tried again.
    capsys.readouterr()
    assert main(["retry", str(fresh)]) == 0
    assert tokens_of(read_rows(fresh)) == tokens_of(expected)
    assert main(["verify", str(fresh), "--replay", "0.1"]) == 0
    assert "0 differ" in capsys.readouterr().out


def test_a_worker_that_never_starts(
    generate: Generate,
    flags: tuple[Any, ...],
    fresh: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(VARIABLE, "worker-start")
    started = time.monotonic()
    assert generate(*flags, "--output", fresh, "--cluster.max_restarts", 2) == 1
    assert time.monotonic() - started < 60
    told = capsys.readouterr().err
    assert "a worker's process died 3 times" in told
    assert "Traceback" not in told
    assert main(["status", str(fresh)]) == 0


def test_sigterm_ends_a_run_within_three_seconds(
    generate: Generate,
    flags: tuple[Any, ...],
    undisturbed: Path,
    fresh: Path,
    cluster: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    slow = ("--num-workers", 1, "--max-num-seqs", 1, "--proposer", "none")
    driver = drive(cluster, *flags, "--output", fresh, *slow)
    deadline = time.monotonic() + 100
    while not parts_of(fresh) and time.monotonic() < deadline and driver.poll() is None:
        time.sleep(0.02)
    assert generate(*flags, "--output", fresh) == 2  # In the meantime: one at a time.
    assert f"in use by process {driver.pid} on" in capsys.readouterr().err
    driver.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    _, err = driver.communicate(timeout=60)
    assert time.monotonic() - asked < 3
    assert driver.returncode == 4, err
    assert "interrupted" in err
    assert "Traceback" not in err
    assert len(parts_of(fresh)) < len(parts_of(undisturbed)), "it was over too soon to tell"
    assert generate(*flags, "--output", fresh) == 0
    assert tokens_of(read_rows(fresh)) == tokens_of(read_rows(undisturbed))


@pytest.mark.parametrize("seconds", [0.3, 1.5, 2.5])
def test_sigterm_while_it_starts(flags: tuple[Any, ...], tmp_path: Path, seconds: float) -> None:
    """Before and while Ray starts, which has a handler of its own."""
    driver = drive(clean_environment(), *flags, "--output", tmp_path / "out")
    time.sleep(seconds)
    driver.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    driver.wait(timeout=60)
    assert time.monotonic() - asked < 3
    _, err = driver.communicate(timeout=60)  # Ray's own processes take longer to notice.
    assert driver.returncode == 4, err
    assert "Traceback" not in err


def test_a_disk_that_is_full(
    generate: Generate,
    flags: tuple[Any, ...],
    undisturbed: Path,
    fresh: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(VARIABLE, "aside%15:28")  # A few parts, and no more.
    assert generate(*flags, "--output", fresh) == 4
    told = capsys.readouterr().err
    assert "No space left on device" in told
    assert "the same command goes on" in told
    assert "Traceback" not in told
    monkeypatch.delenv(VARIABLE)
    assert generate(*flags, "--output", fresh) == 0
    assert tokens_of(read_rows(fresh)) == tokens_of(read_rows(undisturbed))


_ON_A_SMALL_DISK = """
mount -t tmpfs -o size=200k quasar-test "$DISK" || exit 77
"$@"; echo "ended with $?"
mount -o remount,size=50m "$DISK"
"$@"; echo "ended with $?"
cp -r "$DISK/out" "$SAVED"
"""


def test_a_disk_that_is_full_in_truth(
    flags: tuple[Any, ...], undisturbed: Path, tmp_path: Path
) -> None:
    """A file system of 200 KB, which grows; in a Ray of its own, as others do not see it."""
    disk, saved = tmp_path / "disk", tmp_path / "saved"
    disk.mkdir()
    given = map(str, [*flags, "--output", disk / "out", "--recipe", "rtn"])
    command = [sys.executable, "-m", "jobs", "generate", *given]
    alone = ["unshare", "--map-root-user", "--mount", "sh", "-c", _ON_A_SMALL_DISK, "sh"]
    done = subprocess.run(
        [*alone, *command],
        cwd=ROOT,
        env=clean_environment(DISK=str(disk), SAVED=str(saved)),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip(f"no file system of our own here: {done.stderr}")
    assert [line for line in done.stdout.splitlines() if "ended with" in line] == [
        "ended with 4",
        "ended with 0",
    ], done.stderr
    assert "No space left on device" in done.stderr
    assert "the same command goes on" in done.stderr
    assert "Traceback" not in done.stderr
    assert tokens_of(read_rows(saved)) == tokens_of(read_rows(undisturbed))


def test_damage_is_found_and_only_that_is_made_again(
    generate: Generate, flags: tuple[Any, ...], undisturbed: Path, tmp_path: Path
) -> None:
    output = Path(shutil.copytree(undisturbed, tmp_path / "out"))
    parts = parts_of(output)
    content = bytearray(parts[0].read_bytes())
    content[100] ^= 1
    parts[0].write_bytes(content)  # As long as it was: only verify can tell.
    parts[1].write_bytes(b"cut off")
    shard = output / "plan" / "shard-00000-00002.parquet"
    shard.unlink()
    others = {part: (part.stat().st_mtime_ns, part.read_bytes()) for part in parts[2:]}
    assert main(["verify", str(output), "--repair"]) == 4
    assert sorted(p.name for p in (output / "damaged").iterdir()) == [p.name for p in parts[:2]]
    assert generate(*flags, "--output", output) == 0
    assert tokens_of(read_rows(output)) == tokens_of(read_rows(undisturbed))
    assert {part: (part.stat().st_mtime_ns, part.read_bytes()) for part in others} == others
    assert shard.exists()
    assert main(["verify", str(output)]) == 0


def test_every_row_failing_is_told_by_the_exit_code(
    generate: Generate,
    tiny_checkpoint: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, output = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_checkpoint, model)
    (weights,) = model.glob("*.safetensors")
    tensors = load_file(weights)
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], 3e38)
    save_file(tensors, weights, {"format": "pt"})
    given = ("--model", model, "--input", prompts, "--output", output, "--max-tokens", 2)
    assert generate(*given) == 3
    rows = read_rows(output)
    assert {row["error_type"] for row in rows.values()} == {"NonFiniteLogits", "PromptTooLong"}
    assert "of 73 samples failed, more than --max-error-rate 0.5 allows" in capsys.readouterr().err
    assert generate(*given, "--max-error-rate", 1) == 0
    few = tmp_path / "few.jsonl"
    few.write_text('{"prompt": "a"}\n{"prompt": 1}\n{"prompt": 2}\n', encoding="utf-8")
    given = ("--model", tiny_checkpoint, "--input", few, "--output", tmp_path / "few")
    assert generate(*given) == 3
    told = capsys.readouterr().err
    assert "2 of 3 rows cannot run, more than --max-error-rate 0.5 allows; the first: " in told
    assert "line 2: prompt is an int, not a string" in told


def test_the_memory_of_a_run_that_was_killed(fresh: Path) -> None:
    """Failpoints count in a file, so that what they are told of is not forgotten with the process."""
    counter = fresh / "counter"
    code = "from pipeline.failpoints import reach; reach('a', 'b'); reach('a', 'b'); print('alive')"
    told = {**os.environ, VARIABLE: f"a=b*1:{counter}"}
    ends = [
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=told, check=False).returncode
        for _ in range(2)
    ]
    assert ends == [-signal.SIGKILL, 0]
    assert json.loads((fresh / "plan" / "plan.json").read_bytes())["shards"]
