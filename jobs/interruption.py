"""Ends that come from outside: what is done stays, and the process is gone in time."""

import os
import signal
import threading

EXIT_CODE = 4
_SECONDS = 1.5  # Ray's job supervisor kills three seconds after it asked.


def end_on_sigterm() -> None:
    """Let SIGTERM end the process as Ctrl-C does, and soon."""

    def end(*_: object) -> None:
        end_in_time()
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)


def end_in_time() -> None:
    """Be gone soon, whatever hangs."""
    timer = threading.Timer(_SECONDS, os._exit, (EXIT_CODE,))
    timer.daemon = True
    timer.start()
