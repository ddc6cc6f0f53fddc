"""The job as a cluster runs it: `ray job submit` to a real head, absolute paths, read the Parquet."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.conftest import ROOT
from tests.heads import ray_command, ray_head, wait_for_jobs

pytestmark = pytest.mark.ray


@pytest.fixture
def head() -> Iterator[tuple[str, dict[str, str]]]:
    with ray_head(RAY_AUTH_MODE="disabled") as found:
        yield found


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
        [sys.executable, "-W", "ignore", "-c", STATUS, address, name, "240"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=270,
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
