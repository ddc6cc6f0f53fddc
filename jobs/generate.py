"""`generate`: one validated configuration, everything refused early that can be, Ray, and the run."""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import ray
import yaml
from pydantic import ValidationError

from jobs.cli import parse_run, say
from pipeline import storage
from pipeline.config import RunConfig
from pipeline.errors import InputError, describe
from pipeline.sources import check_source, find_sources
from quant.config import QuantConfig
from quant.hub import find_checkpoint

if TYPE_CHECKING:
    from jobs.run import Model


def generate(arguments: Sequence[str]) -> int:
    """Run the main job; returns the exit code. Raises InputError or CheckpointError for bad input."""
    config = parse_run(arguments)
    started = time.monotonic()
    sources = find_sources(config.input)
    if config.quant.calibration:
        check_source(config.quant.calibration)
    _tell_ignored(sources.ignored)
    with _naming(config.output):
        _check_output(config)
    folder = find_checkpoint(config.model).resolve()
    try:
        with ThreadPoolExecutor(1) as aside:
            opening = aside.submit(_open_model, folder, config.quant)
            _start_ray()
            _check_devices(config)
            model = opening.result()
        with _naming(config.output):
            resolved = config.to_yaml().encode()
            storage.write_atomic(storage.join(config.output, "config.yaml"), resolved)
        from jobs.run import run

        run(config, sources.uris, model, started)
    finally:
        ray.shutdown()
    return 0


def _tell_ignored(files: Sequence[str]) -> None:
    if files:
        others = f" and {len(files) - 1} more" if len(files) > 1 else ""
        say(f"not read, as their format is none of ours: {files[0]}{others}")


@contextmanager
def _naming(output: str) -> Iterator[None]:
    """Say in one line that an output cannot be reached: a disk, a network, credentials."""
    try:
        yield
    except OSError as error:
        raise InputError(f"output {output}: cannot be used ({error})") from error


def _check_output(config: RunConfig) -> None:
    """Refuse a foreign or differing output folder, and a relative one inside a Ray job."""
    output = config.output
    in_ray_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    if in_ray_job and storage.is_local(output) and not storage.local_path(output).is_absolute():
        raise InputError(
            f"output {output}: is relative, and a Ray job's folder is deleted with the job; "
            "give an absolute path or a URI"
        )
    if storage.is_local(output) and storage.local_path(output).is_file():
        raise InputError(f"output {output}: is a file, not a folder")
    if not storage.is_writable(output):
        raise InputError(f"output {output}: cannot be written to")
    content = storage.read_bytes(storage.join(output, "config.yaml"))
    if config.resume == "never" and (content or not storage.is_empty_folder(output)):
        raise InputError(f"output {output}: is not empty (--resume never)")
    if content is None:
        if config.resume == "always":
            raise InputError(f"output {output}: holds no run to go on with (--resume always)")
        if not storage.is_empty_folder(output):
            raise InputError(f"output {output}: is not empty and no output of this program")
        return
    try:
        before = RunConfig.model_validate(yaml.safe_load(content)).identity()
    except (yaml.YAMLError, ValidationError) as error:
        reason = describe(error) if isinstance(error, ValidationError) else str(error)
        raise InputError(f"output {output}: config.yaml is damaged ({reason})") from error
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


def _check_devices(config: RunConfig) -> None:
    """Refuse what no node could ever start: Ray would wait for it."""
    if config.cluster.device == "cuda":
        asked, found = config.cluster.num_workers, int(ray.cluster_resources().get("GPU", 0))
        if found < asked:
            raise InputError(
                f"cluster.device cuda: {asked} workers need a GPU each, and Ray knows of {found}"
            )


def _start_ray() -> None:
    """Join the cluster that RAY_ADDRESS or a Ray job names, or start one on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray.init(logging_level=logging.ERROR, log_to_driver=True, include_dashboard=False)
