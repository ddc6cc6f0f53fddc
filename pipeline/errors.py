"""The error that ends a job with exit code 2: the configuration or the input must be mended."""

from pydantic import ValidationError


class InputError(ValueError):
    """Bad configuration or input; the message names the file, the row or the key."""


def describe(error: ValidationError, prefix: str = "") -> str:
    """A validation error in one line that names every key at fault."""
    faults = []
    for fault in error.errors(include_url=False, include_input=True):
        key = ".".join(str(part) for part in (prefix, *fault["loc"]) if str(part))
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
