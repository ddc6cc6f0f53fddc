"""`bench`: what precision, drafts and batch size are worth on this machine, model and prompts."""

import importlib.metadata
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jobs.bench_table import format_bench
from jobs.cli import parse_bench, say
from jobs.folders import new_folder
from jobs.prompts import Prompt, check_lengths, read_prompts, spread
from pipeline.admission import load_tokenizer
from pipeline.config import BenchConfig, recipe_of
from pipeline.sources import check_source, find_sources
from quant.checkpoint import open_checkpoint
from quant.convert import check_precision
from quant.errors import CheckpointError
from quant.hub import find_checkpoint

_BAD_INPUT = 2  # Exit code.


def bench(arguments: Sequence[str]) -> int:
    """Run all arms; returns the exit code. Raises InputError or CheckpointError for bad input."""
    config = parse_bench(arguments)
    sources = find_sources(config.input)
    if config.quant.calibration:
        check_source(config.quant.calibration)
    output = new_folder(config.output)
    folder = find_checkpoint(config.model).resolve()
    checkpoint = open_checkpoint(folder)
    for precision in config.precisions:
        check_precision(checkpoint, recipe_of(config, precision))
    tokenizer = load_tokenizer(folder)
    found = [prompt for uri in sources.uris for prompt in read_prompts(uri, tokenizer, "input")]
    prompts = spread(found, config.num_prompts)
    check_lengths(prompts, config.max_tokens, checkpoint.architecture.max_position_embeddings)
    if code := _in_a_process_of_its_own(config, folder, prompts, output):
        return code
    report = json.loads((output / "bench.json").read_text(encoding="utf-8"))
    table = format_bench(report)
    (output / "bench.md").write_text(table, encoding="utf-8")
    print(table)
    print(f"The numbers are in {output / 'bench.json'}, these tables in {output / 'bench.md'}.")
    return 0


def _in_a_process_of_its_own(
    config: BenchConfig, folder: Path, prompts: list[Prompt], output: Path
) -> int:
    """Run where the environment is a worker's: allocator and threads are read before Python starts."""
    from workers.actor import worker_environment

    num_threads = config.num_threads or os.cpu_count() or 1
    before = dict(os.environ)
    os.environ.update(worker_environment(num_threads))
    try:
        process = multiprocessing.get_context("spawn").Process(
            target=_run, args=(config, folder, prompts, output, num_threads)
        )
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    try:
        process.join()
    except KeyboardInterrupt:
        process.terminate()
        process.join()
        raise
    if process.exitcode not in (0, _BAD_INPUT):
        raise RuntimeError(f"the benchmark's process ended with exit code {process.exitcode}")
    return process.exitcode


def _run(
    config: BenchConfig, folder: Path, prompts: list[Prompt], output: Path, num_threads: int
) -> None:
    """Measure, and write `bench.json`."""
    from jobs.experiment import measure

    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        measured = measure(config, folder, prompts, num_threads)
    except CheckpointError as error:  # Told here: an exception does not cross to the other process.
        say(f"error: {error}")
        sys.exit(_BAD_INPUT)
    report = {
        "provenance": _provenance(num_threads),
        "config": config.model_dump(mode="json"),
        "prompts": [{"task": p.task, "num_tokens": len(p.token_ids)} for p in prompts],
        **measured,
    }
    output.mkdir(parents=True, exist_ok=True)
    (output / "bench.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _end_with_parent() -> None:
    """A benchmark that nobody waits for any more would disturb the next one."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _provenance(num_threads: int) -> dict[str, Any]:
    """What the numbers were measured with."""
    import torch

    from workers.step_times import device_name

    here = Path(__file__).parent
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    packages = ("quasar-batch", "torch", "transformers", "numba", "llvmlite")
    return {
        "commit": commit or None,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(torch.device("cpu")),
        "num_threads": num_threads,
        "num_cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }
