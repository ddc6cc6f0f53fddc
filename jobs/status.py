"""`status`: how far a run has come, from its output folder alone."""

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

from jobs.folders import naming_output
from jobs.live import showing
from pipeline.errors import InputError, InterruptedRunError
from pipeline.inspection import State, read_state
from pipeline.lease import read_holder
from pipeline.progress import ENDED, STALE_SECONDS, Progress, read_progress
from pipeline.summary import describe_drafts

_PAUSE_SECONDS = 2.0


def status(arguments: Sequence[str]) -> int:
    """Print the state of a run; returns the exit code. Raises InputError if there is none."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs status", description="How far a run has come, from its output folder."
    )
    parser.add_argument("output", metavar="OUT", help="the run's output: a folder or a URI")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    parser.add_argument(
        "--follow",
        action="store_true",
        help="show OUT/progress.json until the run has ended: a live view on a terminal, else a line of "
        "JSON every few seconds; ends with 0 where it is complete, else with 4",
    )
    given = parser.parse_args(arguments)
    if given.follow:
        return follow(given.output)
    with naming_output(given.output):
        state = read_state(given.output)
    print(json.dumps(describe(state)) if given.json else format_state(given.output, state))
    return 0


def follow(output: str) -> int:
    """Show how a run is doing until it has ended; returns the exit code.

    Raises:
        InputError: nothing is known of a run there.
        InterruptedRunError: it has died, or nothing has been heard of it for long.
    """
    last, heard = None, time.monotonic()
    with showing() as show:
        while True:
            with naming_output(output):
                holder, progress = read_holder(output), read_progress(output)  # In this order.
            if progress is not None:
                show(progress)
            if holder is None:
                return _ended(output, progress)
            now = progress.at if progress is not None else None
            if now != last:
                last, heard = now, time.monotonic()
            elif time.monotonic() - heard > STALE_SECONDS:
                raise InterruptedRunError(
                    f"output {output}: {holder} has not been heard of for {STALE_SECONDS:.0f} s, so it "
                    "is dead or out of reach; `generate` goes on with it, given what it was given before"
                )
            time.sleep(_PAUSE_SECONDS)


def _ended(output: str, progress: Progress | None) -> int:
    """The exit code where nobody is at it any more."""
    if progress is None:
        raise InputError(
            f"output {output}: no run has begun here, or none that says how it is doing (it has no "
            "readable progress.json)"
        )
    if progress.phase not in ENDED:
        raise InterruptedRunError(
            f"output {output}: the run has died; `generate` goes on with it, given what it was given "
            "before"
        )
    return 0 if progress.phase == "complete" else 4


def describe(state: State) -> dict[str, Any]:
    """The state as JSON has it."""
    plan, summary = state.plan, state.summary
    return {
        "planned": plan is not None,
        "complete": state.is_complete,
        "running": None if state.holder is None else str(state.holder),
        "num_rows_planned": plan.num_rows if plan else None,
        "num_shards_planned": len(plan.shards) if plan else None,
        "damaged": list(state.damaged),
        **summary.to_dict(),
    }


def format_state(output: str, state: State) -> str:
    """The state in a few lines for people."""
    done = state.summary
    shared = f", {done.num_shared:,} shared" if done.num_shared else ""
    stats = done.stats
    if state.plan is None:
        progress = "not planned yet"
    else:
        share = done.num_rows / max(state.plan.num_rows, 1)
        progress = f"{done.num_rows:,} of {state.plan.num_rows:,} done ({share:.1%})"
    lines = {
        "output": output,
        "rows": progress,
        "samples": f"{done.num_samples:,}, {done.num_errors:,} of them failed{shared}",
        "tokens": f"{done.num_input_tokens:,} in, {done.num_generated_tokens:,} out",
        "drafts": describe_drafts(stats.mean_acceptance_length, stats.draft_acceptance_rate),
        "run": _format_run(state),
    }
    if state.damaged:
        lines["damaged"] = "; ".join(state.damaged)
    return "\n".join(f"{key:>8}  {value}" for key, value in lines.items())


def _format_run(state: State) -> str:
    if state.holder is not None:
        return f"in use by {state.holder}"
    if state.is_complete:
        return "complete"
    return "not running; `generate` goes on with it, given what it was given before"
