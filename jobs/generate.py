"""`generate`: one validated configuration, everything refused early that can be, Ray, and the run."""

import logging
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.exceptions import AuthenticationError

from jobs.cli import parse_run, say, say_events
from jobs.folders import going_on, naming_output
from jobs.interruption import end_on_sigterm
from jobs.live import showing
from jobs.nodes import check_address, check_paths, choose_kinds
from pipeline import storage
from pipeline.config import RunConfig
from pipeline.errors import DamagedOutputError, InputError
from pipeline.inspection import read_config
from pipeline.lease import FILE as LEASE_FILE
from pipeline.lease import Lease
from pipeline.plan import Plan
from pipeline.progress import Course, Watch
from pipeline.sources import check_source, find_sources
from quant.config import QuantConfig
from quant.hub import find_checkpoint

if TYPE_CHECKING:
    from jobs.run import Model


def generate(arguments: Sequence[str]) -> int:
    """Run the main job; returns the exit code.

    Raises:
        InputError, CheckpointError: bad input.
        InterruptedRunError: the output was taken over by another run.
    """
    config = parse_run(arguments)
    started = time.monotonic()
    uris = find_inputs(config)
    if config.quant.calibration:
        check_source(config.quant.calibration)
    with naming_output(config.output):
        check_output(config)
    return start(config, uris, started)


def start(config: RunConfig, uris: Sequence[str], started: float, *, retry: bool = False) -> int:
    """Run a job on sources that were found, in an output that was found usable; see `jobs.run.run`."""
    folder = find_checkpoint(config.model).resolve()
    with ExitStack() as stack:
        with naming_output(config.output):
            lease = stack.enter_context(Lease(config.output))
        stack.callback(ray.shutdown)
        aside = stack.enter_context(ThreadPoolExecutor(1))
        opening = aside.submit(_open_model, folder, config.quant)
        start_ray()
        say_events()
        kinds = choose_kinds(config.cluster.pools)
        check_paths(config, folder, uris)
        model = opening.result()
        write_config(config)
        from jobs.run import Setting, run

        course = Course()
        show = stack.enter_context(showing())
        with going_on(config.output), Watch(config.output, course, show):
            return run(config, uris, model, lease, Setting(kinds, course, started), retry=retry)


def find_inputs(config: RunConfig) -> tuple[str, ...]:
    """The sources of a run; what else lies in their folders is told. Raises InputError."""
    try:
        sources = find_sources(config.input)
    except InputError:
        planned = _planned_sources(config.output)
        if not planned:
            raise
        sources = find_sources(config.input, planned)
    if sources.ignored:
        others = f" and {len(sources.ignored) - 1} more" if len(sources.ignored) > 1 else ""
        say(f"not read, as their format is none of ours: {sources.ignored[0]}{others}")
    return sources.uris


def _planned_sources(output: str) -> list[str]:
    """What need not be there any more; nothing where that is not known."""
    try:
        plan = Plan.load(output)
    except (OSError, DamagedOutputError):
        return []
    return [uri for uri, _ in plan.sources] if plan else []


def write_config(config: RunConfig) -> None:
    """Leave the resolved configuration in the output; raises InputError where that cannot be."""
    with naming_output(config.output):
        resolved = config.to_yaml().encode()
        storage.write_atomic(storage.join(config.output, "config.yaml"), resolved)


def check_output(config: RunConfig) -> None:
    """Refuse a foreign or differing output folder, and a relative one inside a Ray job."""
    output = config.output
    in_ray_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    if in_ray_job and storage.is_relative(output):
        raise InputError(
            f"output {output}: is relative, and a Ray job's folder is deleted with the job; "
            "give an absolute path or a URI"
        )
    if storage.is_local(output) and storage.local_path(output).is_file():
        raise InputError(f"output {output}: is a file, not a folder")
    if not storage.is_writable(output):
        raise InputError(f"output {output}: cannot be written to")
    there = read_config(output)
    if config.resume == "never" and (
        there or not storage.is_empty_folder(output, but=[LEASE_FILE])
    ):
        raise InputError(f"output {output}: is not empty (--resume never)")
    if there is None:
        if config.resume == "always":
            raise InputError(f"output {output}: holds no run to go on with (--resume always)")
        if not storage.is_empty_folder(output, but=[LEASE_FILE]):
            raise InputError(f"output {output}: is not empty and no output of this program")
        return
    before = there.identity()
    now = config.identity()
    changed = [f"{k} was {before.get(k)!r}, is {now[k]!r}" for k in now if now[k] != before.get(k)]
    if changed and not _is_unplanned(output):
        raise InputError(
            f"output {output}: holds a run with another configuration ({'; '.join(changed)}); "
            "choose another folder"
        )


def _is_unplanned(output: str) -> bool:
    """Whether a run was refused, or ended, before its plan was whole; if in doubt, it was not."""
    data, plan = storage.join(output, "data"), storage.join(output, "plan", "plan.json")
    return storage.is_local(output) and storage.is_empty_folder(data) and not storage.exists(plan)


def _open_model(folder: Path, config: QuantConfig) -> "Model":
    """Open the model while Ray starts: torch and transformers take seconds to import, Ray to start."""
    from jobs.run import open_model

    return open_model(folder, config)


def start_ray() -> None:
    """Join the cluster that RAY_ADDRESS or a Ray job names, or start one on this machine.

    Raises:
        InputError: the cluster does not answer, or cannot be joined.
    """
    check_address()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(logging_level=logging.ERROR, log_to_driver=True, include_dashboard=False)
    except (ConnectionError, AuthenticationError) as error:
        raise InputError(f"Ray cannot be joined: {error}") from error
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise
        raise InputError(
            f"Ray cannot be joined: {error}; install the cluster's versions here, or use `python -m jobs "
            "submit`"
        ) from error
    except SystemExit as end:
        if end.code != signal.SIGTERM:
            raise
        raise KeyboardInterrupt from end  # It met Ray's own handler.
    end_on_sigterm()  # Ray has put a handler of its own in the place of ours.
