"""docs/tutorial.md: its blocks run as they stand, in order, and say what it says they say."""

import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest

from tests.conftest import ROOT, clean_environment

TUTORIAL = ROOT / "docs" / "tutorial.md"
MODEL = "~/.cache/quasar-batch/models/smollm2-135m-instruct"
PYTHON = ".venv/bin/python"


@dataclass(frozen=True)
class Block:
    """A code block: its language, and what stands in it."""

    language: str
    code: str


def read_blocks() -> list[Block]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", TUTORIAL.read_text("utf-8"), re.M | re.S)
    return [Block(language, code) for language, code in found]


def labels(output: str) -> list[str]:
    """What a line of output begins with, up to what differs from machine to machine."""
    return [line.split()[0] for line in output.splitlines() if line.strip()]


class Reader:
    """Somebody who types the blocks into a shell, and into one Python beside it."""

    def __init__(self, model: Path, ray_address: str) -> None:
        self._model = model
        self._environment = clean_environment(RAY_ADDRESS=ray_address)
        self._names: dict[str, Any] = {}

    def run(self, block: Block) -> str:
        """Type a block; returns what was printed."""
        if block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(block.code, self._names)
            return output.getvalue()
        code = block.code.replace(PYTHON, sys.executable).replace(MODEL, str(self._model))
        result = subprocess.run(
            ["bash", "-e", "-c", code],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, f"{code}\n{result.stdout}"
        return result.stdout


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with what the tutorial needs of the repository."""
    for name in ("examples", "jobs", "pipeline", "workers", "quant"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


@pytest.fixture
def reader(demo_model: Path, folder: Path) -> Iterator[Reader]:
    """With one Ray for all commands, in that folder: else each would start its own."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": 400 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, connect=False, head_node_args=node)
    yield Reader(demo_model, cluster.address)
    cluster.shutdown()


def test_every_block_is_run_or_compared() -> None:
    languages = [block.language for block in read_blocks()]
    assert set(languages) == {"", "bash", "python", "text"}
    assert [block.code for block in read_blocks() if not block.language] == ["make setup\n"]
    assert languages.count("bash") >= 9
    for before, after in pairwise(languages):
        assert after != "text" or before == "bash", "an output stands behind its command"


@pytest.mark.ray
@pytest.mark.real_model
@pytest.mark.timeout(600)  # Some seven processes, on a machine that may be busy.
def test_the_tutorial_works(reader: Reader, folder: Path) -> None:
    output = ""
    for block in read_blocks():
        if block.language in ("bash", "python"):
            output = reader.run(block)
        elif block.language == "text":
            there = set(labels(output))
            assert set(labels(block.code)) <= there, f"{block.code}\n--- but:\n{output}"
    made = folder / "outputs" / "tutorial"
    answers = pq.read_table(made / "answers.parquet").to_pylist()
    samples, best = (
        [json.loads(line) for line in (made / name).read_text("utf-8").splitlines()]
        for name in ("samples.jsonl", "best.jsonl")
    )
    assert [len(answers), len(samples), len(best)] == [14, 42, 14]
    assert len({row["id"] for row in answers}) == 14
    assert all(row["error"] is None and row["generated_text"] for row in answers)
    assert all(row.keys() == {"instruction", "response", "task"} for row in best)
    sampled = {(row["instruction"], row["generated_text"].strip()) for row in samples}
    assert {(row["instruction"], row["response"]) for row in best} <= sampled
    assert (made / "answers" / "report.html").stat().st_size > 10_000
    assert "14" in (made / "answers" / "README.md").read_text("utf-8")
