"""What the tests share: seeds, models, one local Ray, and the command line in a process of its own."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.runs import BASE, NUM_ROWS, Generate, write_prompts

ROOT = Path(__file__).parents[1]

# As in a worker's environment: threads that spin would starve the tests' other processes.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of three layers with a byte tokenizer and a chat template."""
    from tests.tiny import make_checkpoint, tiny_tokenizer

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    make_checkpoint(folder, "llama", std=0.1)
    return tiny_tokenizer(folder)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct; downloaded on first use."""
    from jobs.models import fetch_demo_model

    return fetch_demo_model()


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray of three CPUs for all tests of this process."""
    import logging

    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment without what would join another Ray, with `extra` on top."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_ADDRESS", "RAY_JOB"))}
    return kept | extra


def run_jobs(
    *arguments: object, cwd: Path = ROOT, timeout: float = 150, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`python -m jobs ...` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "jobs", *map(str, arguments)],
        cwd=cwd,
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(scope="session")
def generate(ray_session: None) -> Iterator[Generate]:
    """The command in this process, on the tests' own Ray instead of one that it starts."""
    import jobs.generate
    from jobs.__main__ import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs.generate.ray, "init", lambda **_: None)
        patch.setattr(jobs.generate.ray, "shutdown", lambda: None)
        yield lambda *arguments: main(["generate", "--recipe", "rtn", *map(str, arguments)])


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("input") / "prompts.jsonl", NUM_ROWS)


@pytest.fixture(scope="session")
def flags(prompts: Path, tiny_checkpoint: Path) -> tuple[Any, ...]:
    """What the run below and those compared with it have in common."""
    return ("--model", tiny_checkpoint, "--input", prompts, *BASE, "--data.rows_per_shard", 8)


@pytest.fixture(scope="session")
def undisturbed(
    generate: Generate, flags: tuple[Any, ...], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run that all others must equal: one worker, three rows at once, nothing drafted."""
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    given = ("--proposer", "none", "--max-num-seqs", 3, "--num-workers", 1)
    assert generate(*flags, "--output", output, *given) == 0
    return output
