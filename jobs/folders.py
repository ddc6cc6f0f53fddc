"""Folders that a command makes, or works on."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import InputError, InterruptedRunError
from pipeline.storage import is_local, is_writable


def new_folder(output: str) -> Path:
    """The folder of this name, which can be written and holds nothing; raises InputError otherwise."""
    if not is_local(output):
        raise InputError(f"output {output}: must be a folder of this machine")
    path = Path(output).expanduser()
    if path.is_file():
        raise InputError(f"output {output}: is a file, not a folder")
    if path.is_dir() and any(path.iterdir()):
        raise InputError(f"output {output}: is not empty")
    if not is_writable(str(path)):
        raise InputError(f"output {output}: cannot be written to")
    return path.resolve()


@contextmanager
def naming_output(output: str) -> Iterator[None]:
    """Say in one line that an output cannot be reached: a disk, a network, credentials."""
    if not output:
        raise InputError("output: must not be empty")
    try:
        yield
    except OSError as error:
        raise InputError(f"output {output}: cannot be used ({error})") from error


@contextmanager
def going_on(output: str) -> Iterator[None]:
    """Say in one line that an output could be used, and cannot any more: a disk that is full."""
    try:
        yield
    except OSError as error:
        raise InterruptedRunError(
            f"output {output}: cannot be used ({error}); what is done stays, and the same command goes "
            "on once that is mended"
        ) from error
