"""Places where a test lets a process die (SIGKILL, as a machine that loses its power), or a call fail.

$QUASAR_FAILPOINT names one. `row=ID` or `part-placed` die there, with `*TIMES:FILE` behind it so many
times only, counted in a file. `storage%5:28` lets every fifth call of a process fail with error number
28. Nothing happens where it is not set.
"""

import os
import signal
from collections import Counter
from pathlib import Path

VARIABLE = "QUASAR_FAILPOINT"
_calls = Counter[str]()


def reach(name: str, detail: str = "") -> None:
    """Die here, or raise OSError, if that was asked for."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    place, failing, rest = wanted.partition("%")
    if failing:
        _fail(name, place, rest)
    else:
        _die(name, detail, wanted)


def _fail(name: str, place: str, rest: str) -> None:
    every, _, number = rest.partition(":")
    if place == name:
        _calls[name] += 1
        if _calls[name] % int(every) == 0:
            raise OSError(int(number), os.strerror(int(number)))


def _die(name: str, detail: str, wanted: str) -> None:
    place, _, limit = wanted.partition("*")
    if place not in (name, f"{name}={detail}"):
        return
    if limit:
        times, _, counter = limit.partition(":")
        with Path(counter).open("a+b") as file:
            if file.seek(0, os.SEEK_END) >= int(times):
                return
            file.write(b".")
    os.kill(os.getpid(), signal.SIGKILL)
