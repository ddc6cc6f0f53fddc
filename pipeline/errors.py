"""What ends a run (a configuration or an input that must be mended, an interruption), and a row."""

from typing import Any

from pydantic import ValidationError


class EndOfRunError(Exception):
    """What ends a command with one line, and with this exit code."""

    exit_code = 1


class InputError(EndOfRunError, ValueError):
    """Bad configuration or input; the message names the file, the row or the key."""

    exit_code = 2


class InterruptedRunError(EndOfRunError):
    """A run that ends before it is done and can be gone on with."""

    exit_code = 4


class DamagedOutputError(EndOfRunError):
    """A file of an output that the run cannot do without; the message names it, and what to do."""

    exit_code = 4


class TooManyErrorsError(EndOfRunError):
    """More rows fail than may."""

    exit_code = 3


class WorkerLostError(EndOfRunError):
    """Workers died and were started again as often as they may be."""


class DamagedPartError(Exception):
    """A part that is there and is not whole; the message names it."""


class Refusal(Exception):  # noqa: N818 - a verdict on a row, not a fault of the program
    """Why a row cannot run: a kind for counting, a message for people."""

    def __init__(self, error_type: str, message: str) -> None:
        super().__init__(message)
        self.error_type = error_type


def describe(error: ValidationError, prefix: str = "") -> str:
    """A validation error in one line that names every key at fault."""
    faults = []
    for fault in error.errors(include_url=False, include_input=True):
        key = ".".join(str(part) for part in (prefix, *fault["loc"]) if str(part)) or "the whole"
        if fault["type"] == "extra_forbidden":
            faults.append(f"unknown key {key}")
        elif fault["type"] == "missing":
            faults.append(f"{key} is missing")
        else:
            message = fault["msg"].removeprefix("Value error, ")
            given = fault["input"]  # Of a whole section, the message says what is wrong.
            got = "" if isinstance(given, dict) else f" (got {given!r:.80})"
            faults.append(f"{key}: {message}{got}")
    return "; ".join(faults)


def kind_of(value: Any) -> str:
    """What a value is, for people who expected something else."""
    if value is None:
        return "null"
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"
