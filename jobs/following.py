"""A job that runs elsewhere, followed to its end by asking for its status.

Ray's stream of its log breaks where its job does not.
"""

import time
from collections.abc import Callable

from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobErrorType, JobStatus

from jobs.cli import say
from jobs.job_server import JobServer
from pipeline.errors import EndOfRunError, InputError, InterruptedRunError

_SECONDS, _MAX_SECONDS = 1.0, 30.0  # Between two questions.
_SHARE = 0.1  # Of the time may be spent on asking: the log comes whole each time.
_PATIENCE = 300.0  # Seconds without an answer.
_LOG_TRIES = 5  # At the end.
# Of a server that is down, overloaded, behind a broken proxy, or come up with another token.
_NO_ANSWER = (OSError, RuntimeError, ValueError, AuthenticationError)
_FAULTS = (JobErrorType.RUNTIME_ENV_SETUP_FAILURE, JobErrorType.JOB_ENTRYPOINT_COMMAND_START_ERROR)


def follow(server: JobServer, name: str) -> int:
    """Print what a job prints until it has ended; returns the exit code of its command.

    Raises:
        InterruptedRunError: it was stopped, or the cluster lost it, or does not answer any more.
        EndOfRunError: its command could not be started.
    """
    log = _Log(server, name)
    while True:
        info = _ask(lambda: server.get_job_info(name), name)
        if info.status.is_terminal():
            log.print_rest()
            return _exit_code(name, info)
        began = time.monotonic()
        log.print_news()
        time.sleep(_pause(time.monotonic() - began))


def check_job(server: JobServer, name: str) -> None:
    """Refuse to follow a job that the cluster does not know; raises InputError."""
    try:
        server.get_job_info(name)
    except _NO_ANSWER as error:
        if f"{name} does not exist" in str(error):
            raise InputError(
                f"--follow {name}: the cluster knows no such job (`ray job list` names those it knows; a "
                "head that was started anew knows none of before)"
            ) from error


def _pause(seconds: float) -> float:
    """How long to wait behind a log that took so long to come."""
    return min(_MAX_SECONDS, max(_SECONDS, seconds * (1 / _SHARE - 1)))


class _Log:
    """What a job has printed, and how much of it is printed here."""

    def __init__(self, server: JobServer, name: str) -> None:
        self._server = server
        self._name = name
        self._num_printed = 0

    def print_news(self) -> bool:
        """Print what is new; returns whether that could be told."""
        try:
            text = self._server.get_job_logs(self._name)
        except _NO_ANSWER:
            return False
        print(text[self._num_printed :], end="", flush=True)
        self._num_printed = max(self._num_printed, len(text))
        return True

    def print_rest(self) -> None:
        """Print what is new at the end, which is there now: a server that stumbles is asked again."""
        for _ in range(_LOG_TRIES):
            if self.print_news():
                return
            time.sleep(_SECONDS)
        say(f"the end of its log cannot be read; `ray job logs {self._name}` may have it")


def _ask(question: Callable[[], JobDetails], name: str) -> JobDetails:
    """The answer, however late; raises InterruptedRunError where there is none in good time."""
    silent_since = None
    while True:
        try:
            info = question()
        except _NO_ANSWER as error:
            if f"{name} does not exist" in str(error):
                raise InterruptedRunError(
                    f"the cluster knows no job {name} (was its head started anew?); the same command "
                    "goes on"
                ) from error
            if silent_since is None:
                silent_since = time.monotonic()
                say(f"the cluster does not answer; asking on for {_PATIENCE / 60:g} minutes")
            if time.monotonic() - silent_since > _PATIENCE:
                raise InterruptedRunError(
                    f"the cluster does not answer any more, and job {name} may run on"
                ) from error
            time.sleep(_SECONDS)
            continue
        if silent_since is not None:
            say("the cluster answers again")
        return info


def _exit_code(name: str, info: JobDetails) -> int:
    """The command's own, as a shell tells it; raises EndOfRunError where there is none."""
    code = info.driver_exit_code
    if info.status == JobStatus.STOPPED:
        raise InterruptedRunError(f"job {name} was stopped; the same command goes on from here")
    if code is None and info.status == JobStatus.FAILED:
        told = f"job {name}: {' '.join((info.message or 'failed').split())[:1000]}"
        if info.error_type in _FAULTS:
            raise EndOfRunError(told)
        raise InterruptedRunError(f"{told}; the same command goes on from here")
    if code is not None and code < 0:
        say(f"job {name}: its command was killed by signal {-code}")
        return 128 - code
    return code or 0
