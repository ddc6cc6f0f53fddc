"""The house of docs/architecture.md, enforced: imports go down, third parties have one door each."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from tests import test_lossless
from workers.config import ProposerName

ROOT = Path(__file__).parents[1]
FLOORS = ("quant", "workers", "pipeline", "jobs")  # From the ground up.
SOURCES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SOURCES]

# Third party -> the only places that may import it; a folder's name stands for all in it.
DOORS = {
    "ray": {
        "pipeline/graph.py",
        "pipeline/pool.py",
        "pipeline/places.py",
        "pipeline/metrics.py",
        "quant/store.py",
        "jobs",
    },
    "smart_open": {"pipeline/storage.py"},
    "transformers": {"pipeline/admission.py", "quant/architecture.py", "jobs/models.py"},
    "pydantic": {
        "quant/config.py",
        "workers/config.py",
        "pipeline/config.py",
        "pipeline/cluster.py",
        "pipeline/admission.py",
        "pipeline/errors.py",
        "jobs",
    },
    "pydantic_settings": {"jobs"},
    "numba": {
        "workers/jit.py",
        "workers/tiles.py",
        "workers/vnni.py",
        "workers/kernels.py",
        "workers/attention.py",
        "workers/matmul.py",
        "workers/actor.py",
    },
    "llvmlite": {"workers/tiles.py", "workers/vnni.py", "workers/kernels.py", "workers/actor.py"},
    "safetensors": {"quant/checkpoint.py", "quant/compressed.py"},
    "rich": {"jobs"},
    "plotly": {"jobs"},
    "yaml": {"jobs", "pipeline/config.py"},
    "huggingface_hub": {"quant/hub.py", "jobs/push.py"},
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: relative import in line {node.lineno}"
            assert node.module is not None
            yield node.module


def test_there_is_something_to_check() -> None:
    assert {path.parent.name for path in SOURCES} == set(FLOORS)
    assert set(imported(ROOT / "pipeline" / "graph.py")) >= {"ray", "ray.data", "pipeline.plan"}
    assert "transformers" in set(imported(ROOT / "pipeline" / "admission.py"))  # In a function.


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_go_down(path: Path) -> None:
    floor = FLOORS.index(path.relative_to(ROOT).parts[0])
    above = {*FLOORS[floor + 1 :], "tests"}
    assert [m for m in imported(path) if m.split(".")[0] in above] == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_third_parties_have_one_door(path: Path) -> None:
    name = name_of(path)
    for module in imported(path):
        doors = DOORS.get(module.split(".")[0])
        if doors is not None:
            assert name in doors or name.split("/")[0] in doors, f"{name} imports {module}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= 60, f"{name_of(path)}: {node.name} has {length} lines"


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_starts_nothing() -> None:
    """No Ray, no connection, no process, no compilation: for all modules, in one fresh interpreter."""
    code = f"""
import socket, subprocess, sys, threading

def refuse(*args, **kwargs):
    raise AssertionError("an import opened a connection or a process")

socket.socket.connect = refuse
socket.create_connection = refuse
subprocess.Popen.__init__ = refuse
import importlib
for name in {MODULES!r}:
    if not name.endswith("__main__"):
        importlib.import_module(name)
import ray
assert not ray.is_initialized()
import torch
assert not torch.cuda.is_initialized()
from numba.core.dispatcher import Dispatcher
from workers import attention, kernels, tiles
compiled = [f for m in (attention, kernels, tiles) for f in vars(m).values() if isinstance(f, Dispatcher)]
assert compiled
assert [f.__name__ for f in compiled if f.signatures] == []
assert threading.active_count() == 1, threading.enumerate()
"""
    assert run_python(code) == ""


def test_the_engine_needs_no_ray() -> None:
    """Neither to be imported, nor any of what stands around it but the actor."""
    below = [m for m in MODULES if m.startswith(("workers", "quant"))]
    needless = [m for m in below if m not in ("workers.actor", "quant.store")]
    code = f"""
import importlib, sys
for name in {needless!r}:
    importlib.import_module(name)
print(sorted({{"ray", "transformers", "smart_open"}} & set(sys.modules)))
"""
    assert run_python(code).strip() == "[]"


def test_every_proposer_stands_in_the_lossless_matrix() -> None:
    names = set(get_args(ProposerName))
    assert names
    assert names <= set(test_lossless.PROPOSERS)


def test_doors_lead_somewhere() -> None:
    """A file that is renamed takes its door with it."""
    names = {name_of(path) for path in SOURCES}
    files = {door for doors in DOORS.values() for door in doors if door.endswith(".py")}
    assert files <= names
