"""A Ray head of our own, with a job server, for tests of what is submitted to one."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import clean_environment


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def ray_command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).parent / "ray"), *arguments]


@contextmanager
def ray_head(**extra: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The address of its job server, and the environment to talk to it."""
    port, dashboard = free_port(), free_port()
    environment = clean_environment(RAY_USAGE_STATS_ENABLED="0", **extra)
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
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
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
