"""What the tests share: seeds, models, one local Ray, and the command line in a process of its own."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

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
