"""Places where a test lets a process die: SIGKILL, as a machine that loses its power.

$QUASAR_FAILPOINT names one, `row=ID` or `part-placed`, with `*TIMES:FILE` behind it to die so many
times only, counted in a file. Nothing happens where it is not set.
"""

import os
import signal
from pathlib import Path

VARIABLE = "QUASAR_FAILPOINT"


def reach(name: str, detail: str = "") -> None:
    """Die here, if that was asked for."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
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
