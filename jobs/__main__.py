"""`python -m jobs COMMAND`: dispatch, and one line for every mistake that is the user's to mend."""

import importlib
import sys
from collections.abc import Callable, Sequence

from jobs.interruption import (
    EXIT_CODE,
    end_in_time_on_sigterm,
    end_on_sigterm,
    ending,
    leave,
    tell,
)

_COMMANDS = (
    *("generate", "plan", "status", "report", "verify", "retry", "merge", "push"),
    *("submit", "quantize", "bench", "demo"),
)
_USAGE = """usage: python -m jobs COMMAND [options]

commands:
  generate   generate a data set: prompts in, answers with acceptance statistics out
  plan       the first phase of generate by itself: what there is to do, what it takes
  status     how far a run has come, from its output folder alone
  report     a page with what a run did, or a card for its data set; or two runs side by side
  verify     check every file of an output; generate some rows again and compare
  retry      try the rows of a run again that failed
  merge      the parts of a run as one data set, in files of a target size
  push       the parts of a run and its card to the Hugging Face hub
  submit     one of generate, plan, retry, verify, merge and quantize as a job on a Ray cluster
  quantize   convert a checkpoint to W8A8, measure it, write it for this and other engines
  bench      measure drafts, precisions and batch sizes on this machine and your prompts
  demo       generate, with the demo model and the example prompts, shown in the terminal

python -m jobs COMMAND --help lists a command's options."""


def main(arguments: Sequence[str]) -> int:
    """Run a command.

    Exit codes: 0 done, 1 a fault of ours, 2 bad configuration or input, 3 done (or stopped) with more
    failed samples than allowed, 4 interrupted: the same command goes on.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if arguments else 2
    if arguments[0] not in _COMMANDS:
        print(f"error: unknown command {arguments[0]!r}\n\n{_USAGE}", file=sys.stderr)
        return 2
    from pipeline.errors import DamagedPartError, EndOfRunError
    from quant.errors import CheckpointError

    try:
        return _command(arguments[0])(arguments[1:])
    except EndOfRunError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except CheckpointError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except DamagedPartError as error:
        told = " ".join(str(error).split())
        print(f"error: {told}; `verify --repair` sets it aside", file=sys.stderr)
        return 4
    except KeyboardInterrupt:
        tell()
        return EXIT_CODE


def _command(name: str) -> Callable[[Sequence[str]], int]:
    """Import a command only when it runs: Ray and torch take seconds."""
    command: Callable[[Sequence[str]], int] = getattr(importlib.import_module(f"jobs.{name}"), name)
    return command


if __name__ == "__main__":
    end_on_sigterm()
    end_in_time_on_sigterm()
    leave(ending(lambda: main(sys.argv[1:])))
