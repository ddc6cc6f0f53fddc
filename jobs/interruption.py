"""Ends that come from outside: what is done stays, and the process is gone in time."""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

EXIT_CODE = 4
_SECONDS = 1.5  # Ray's job supervisor kills three seconds after it asked.
_is_told = threading.Event()


def end_on_sigterm() -> None:
    """Let SIGTERM end the process as Ctrl-C does."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)


def end_in_time_on_sigterm() -> None:
    """Let a SIGTERM end the process soon, whatever hangs and whoever handles it.

    The main thread may be waiting inside Ray, where it sees no signal: another thread is told.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while os.read(reader, 1)[0] != signal.SIGTERM:
            pass
        time.sleep(_SECONDS)
        tell()
        os._exit(EXIT_CODE)

    threading.Thread(target=watch, name="sigterm", daemon=True).start()


def ending(command: Callable[[], int]) -> int:
    """Run a command to its exit code; whoever asks twice for an end gets it once."""
    try:
        code = command()
    except KeyboardInterrupt:  # Again, while the first was told.
        code = EXIT_CODE
    if code == EXIT_CODE:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    return code


def leave(code: int) -> NoReturn:
    """End the process with what Python has to do at its end, and no more.

    Taking the interpreter down takes a second, in which a signal kills, and in which libraries that have
    threads of their own abort at times.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def tell() -> None:
    """Say that it was interrupted, once."""
    if not _is_told.is_set():
        _is_told.set()
        print("interrupted; the same command goes on from here", file=sys.stderr, flush=True)
