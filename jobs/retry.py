"""`retry`: the rows of a run that failed, tried again; all others stay as they are."""

import argparse
import time
from collections.abc import Sequence

from jobs.folders import naming_output
from jobs.generate import start
from pipeline.errors import InputError
from pipeline.inspection import read_state
from pipeline.manifest import has_failed_rows


def retry(arguments: Sequence[str]) -> int:
    """Run the failed rows of an output; returns the exit code, as `generate` does.

    Raises:
        InputError: no run has been planned there.
    """
    given = parse_retry(arguments)
    started = time.monotonic()
    with naming_output(given.output):
        state = read_state(given.output)
    plan = state.plan
    if plan is None:
        raise InputError(f"output {given.output}: is not planned yet")
    if state.is_complete and not any(
        has_failed_rows(report, plan.shard(name)) for name, report in state.done.items()
    ):
        num_refused = sum(shard.num_refused for shard in plan.shards)
        cannot = f" ({num_refused} cannot run as they are)" if num_refused else ""
        print(f"no row to try again{cannot}")
        return 0
    config = state.config.model_copy(update={"output": given.output})
    return start(config, [uri for uri, _ in plan.sources], started, retry=True)


def parse_retry(arguments: Sequence[str]) -> argparse.Namespace:
    """What a command line asks for; raises SystemExit where it is none, or asks for help."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs retry",
        description="Try the rows of a run again that failed. Rows that could not run (bad JSON, too "
        "long, ...) are not tried: their input must be mended.",
    )
    parser.add_argument("output", metavar="OUT", help="the run's output: a folder or a URI")
    return parser.parse_args(arguments)
