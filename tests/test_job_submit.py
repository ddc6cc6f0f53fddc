"""The job as a cluster runs it: `ray job submit` to a real head, absolute paths, read the Parquet."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.conftest import ROOT, clean_environment

pytestmark = pytest.mark.ray


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def ray_command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).parent / "ray"), *arguments]


@pytest.fixture
def head() -> Iterator[tuple[str, dict[str, str]]]:
    """A head of our own: the address of its job server, and the environment to talk to it."""
    port, dashboard = free_port(), free_port()
    environment = clean_environment(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    # Short: the path of a socket may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="qb-", ignore_cleanup_errors=True) as folder:
        command = ray_command(
            *("start", "--head", "--block", f"--port={port}", f"--dashboard-port={dashboard}"),
            *("--dashboard-host=127.0.0.1", "--num-cpus=2", f"--temp-dir={folder}"),
            *("--object-store-memory=200000000", "--disable-usage-stats"),
            # The job agent listens on a fixed port unless told otherwise: another Ray may have it.
            f"--dashboard-agent-listen-port={free_port()}",
            f"--dashboard-agent-grpc-port={free_port()}",
        )
        with open(Path(folder) / "head.log", "wb") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield f"http://127.0.0.1:{dashboard}", environment
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End this head and what it started: its process group, nobody else's."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            continue
    process.wait(15)


def wait_for_jobs(address: str, deadline: float) -> None:
    """Until the job server listens."""
    host, port = address.removeprefix("http://").split(":")
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=1):
                return
        except OSError:
            assert time.monotonic() < deadline, "the head does not come up"
            time.sleep(0.2)


STATUS = """
import json, sys, time
from ray.job_submission import JobSubmissionClient
client = JobSubmissionClient(sys.argv[1])
deadline = time.monotonic() + float(sys.argv[3])
while True:
    info = client.get_job_info(sys.argv[2])
    if info.status.is_terminal() or time.monotonic() > deadline:
        break
    time.sleep(0.5)
log = client.get_job_logs(sys.argv[2])
print(json.dumps([info.status, info.driver_exit_code, info.message, log]))
"""


def submit(address: str, environment: dict[str, str], job: list[str]) -> str:
    """`ray job submit`; again while the head is not quite up. Returns the submission id."""
    deadline = time.monotonic() + 120
    while True:
        name = f"quasar-{time.monotonic_ns()}"
        command = ray_command(
            *("job", "submit", "--address", address, "--working-dir", str(ROOT)),
            *("--submission-id", name, "--no-wait", "--", *job),
        )
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        if result.returncode == 0:
            return name
        assert "No available agent" in result.stderr, result.stderr
        assert time.monotonic() < deadline, result.stderr
        time.sleep(1)


@pytest.mark.timeout(420)
def test_a_submitted_job_writes_its_parts(
    head: tuple[str, dict[str, str]], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    address, environment = head
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out"
    lines = [json.dumps({"prompt": f"row {i} row {i}"}) for i in range(5)]
    prompts.write_text("\n".join(lines), encoding="utf-8")
    wait_for_jobs(address, time.monotonic() + 60)
    given = ("--model", str(tiny_checkpoint), "--input", str(prompts), "--output", str(output))
    command = [sys.executable, "-m", "jobs", "generate", *given, "--max-tokens", "8"]
    name = submit(address, environment, command)
    waiter = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STATUS, address, name, "90"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    status, code, message, log = json.loads(waiter.stdout.splitlines()[-1])
    assert (status, code) == ("SUCCEEDED", 0), f"{message}\n{log}"
    (part,) = (output / "data").glob("*.parquet")
    rows = pq.read_table(part).to_pylist()
    assert [row["id"] for row in rows] == [f"in.jsonl:{i}" for i in range(1, 6)]
    assert all(row["error"] is None and row["generated_tokens"] for row in rows)
    assert (output / "summary.json").is_file()
    assert "5 (5 samples, 0 errors)" in log
