"""`submit`: a command of ours as a job on a Ray cluster: checked here, followed to its end."""

import argparse
import os
import re
import secrets
import shlex
import time
from collections.abc import Sequence

from jobs.cli import say
from jobs.following import check_job, follow
from jobs.interruption import EXIT_CODE
from jobs.job_command import JobCommand, check_command
from jobs.job_server import JobServer, connect
from jobs.upload import find_upload
from pipeline.errors import InputError

# Ray kills three seconds after it has asked a job to stop. A driver is gone by then, its workers on a
# busy machine perhaps not.
_ENVIRONMENT = {"RAY_JOB_STOP_WAIT_TIME_S": "30"}
_MAX_MEGABYTES = 100  # Ray's own limit.


def submit(arguments: Sequence[str]) -> int:
    """Start a job and follow it; returns the exit code of its command.

    Raises:
        InputError: the command, the working folder or the address is wrong.
        InterruptedRunError: the job was stopped, or the cluster lost it, or does not answer any more.
        EndOfRunError: the job could not be started.
    """
    own, command = _split(arguments)
    given = _parse(own)
    if given.follow:
        if command:
            raise InputError("--follow: takes no command; the job has one")
        server = connect(_address(given.address))
        check_job(server, given.follow)
        return _follow(server, given.follow, given.stop_on_interrupt)
    environment = _ENVIRONMENT | dict(given.env)
    upload = find_upload(given.working_dir)
    job = check_command(command, upload)
    upload.check_size(given.max_upload_mb)
    upload.check_packages()
    server = connect(_address(given.address))
    name = job_name(job.output)
    at = f"{server.get_address()}, {upload.num_bytes / 1e6:.1f} MB of {upload.folder}"
    say(f"job {name} at {at}" + ("" if upload.has_project else ", with the package of the nodes"))
    try:
        server.start(
            name,
            entrypoint(job, given.python, environment),
            runtime_env={"working_dir": str(upload.folder), "env_vars": environment},
            metadata={"command": job.name, "output": job.output},
        )
    except KeyboardInterrupt:
        return _leave(server, name, "if it was started, the job goes on", given.stop_on_interrupt)
    if given.no_wait:
        print(name)
        say(_hints(server, name))
        return 0
    return _follow(server, name, given.stop_on_interrupt)


def job_name(output: str) -> str:
    """A new submission id that begins with the output's name: Ray takes none twice."""
    last = re.sub(r"[^A-Za-z0-9_.-]+", "-", output.rstrip("/").rpartition("/")[2]).strip("-.")
    return f"{last[:40] or 'job'}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def entrypoint(job: JobCommand, python: str, environment: dict[str, str]) -> str:
    """What the head's shell runs, in the job's copy of the working folder."""
    command = shlex.join([python, "-m", "jobs", job.name, *job.arguments])
    # Ray sets it to 1, as a driver asks for no CPU; quantize and verify compute in theirs.
    clean = "" if "OMP_NUM_THREADS" in environment else "unset OMP_NUM_THREADS; "
    return f"{clean}exec {command}"


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, and the command behind `--`."""
    given = list(arguments)
    at = given.index("--") if "--" in given else len(given)
    return given[:at], given[at + 1 :]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jobs submit",
        usage="%(prog)s [options] -- COMMAND ...",
        description="Run a command (generate, plan, retry, verify, merge, quantize) as a job on a Ray "
        "cluster, and follow it to its end. It is checked here first. The working folder is uploaded, "
        "but for what its .gitignore and .rayignore files name, and relative paths of the command are "
        "read in it; all others are paths of the cluster.",
    )
    parser.add_argument(
        "--address",
        help="the head's dashboard, http://HEAD:8265; without it $RAY_API_SERVER_ADDRESS or $RAY_ADDRESS",
    )
    parser.add_argument(
        "--working-dir", default=".", metavar="DIR", help="the folder to upload; default: this one"
    )
    parser.add_argument(
        "--max-upload-mb",
        type=_megabytes,
        default=5.0,
        metavar="N",
        help="refuse to upload more; default: 5",
    )
    parser.add_argument(
        "--env",
        type=_pair,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an environment variable of the job and its workers, such as QUASAR_CACHE; Ray shows it to "
        "whoever sees the job",
    )
    parser.add_argument(
        "--python",
        default="python",
        metavar="FILE",
        help="the head's Python; default: its `python`",
    )
    _add_following(parser)
    return parser.parse_args(arguments)


def _add_following(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-wait", action="store_true", help="print the job's id, and return")
    parser.add_argument("--follow", metavar="ID", help="follow a job that was submitted before")
    parser.add_argument(
        "--stop-on-interrupt", action="store_true", help="Ctrl-C and SIGTERM here stop the job, too"
    )


def _megabytes(text: str) -> float:
    value = float(text)
    if not 0 < value <= _MAX_MEGABYTES:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and up to {_MAX_MEGABYTES}")
    return value


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", key):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def _address(given: str | None) -> str:
    """Where the job server is; raises InputError where nobody says so."""
    found = given or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
    if not found:
        raise InputError("no cluster is named; give --address http://HEAD:8265")
    return found


def _follow(server: JobServer, name: str, stop: bool) -> int:
    try:
        code = follow(server, name)
    except KeyboardInterrupt:
        return _leave(server, name, "the job goes on", stop)
    say(f"job {name}: " + ("done" if code == 0 else f"ended with exit code {code}"))
    return code


def _leave(server: JobServer, name: str, state: str, stop: bool) -> int:
    """Say what becomes of a job that is not followed any more; returns the exit code."""
    try:
        if stop:
            server.stop_job(name)
            say(f"job {name} is asked to stop; the same command goes on from there")
            return EXIT_CODE
    except (OSError, RuntimeError) as error:
        say(f"job {name} could not be stopped ({error})")
    say(f"interrupted here; {state}. {_hints(server, name)}")
    return EXIT_CODE


def _hints(server: JobServer, name: str) -> str:
    address = server.get_address()
    return (
        f"To follow it: python -m jobs submit --address {address} --follow {name}; "
        f"to stop it: ray job stop --address {address} {name}"
    )
