"""docs/operations.md: its sizes are what our functions say, and its flags and links exist."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ray._private.ray_constants import DEFAULT_OBJECT_STORE_MEMORY_PROPORTION

from jobs import configuration
from pipeline.cluster import ClusterConfig, WorkersConfig
from quant.architecture import Architecture
from quant.checkpoint import tensor_shapes
from quant.config import QuantConfig
from quant.convert import num_bytes
from quant.store import _LAYERS_IN_WORK, STORE_SHARE
from tests.shapes import LLAMA_8B, LLAMA_70B
from workers.torch_backend import TorchBackend

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
GIB = 2**30


def sizes(architecture: Architecture) -> list[str]:
    """A column of the table of sizes."""
    a = architecture
    weights = num_bytes(a, QuantConfig())
    cache = TorchBackend(torch.bfloat16, "meta").new_cache(a, 1, 2048).nbytes
    return [
        f"{sum(math.prod(shape) for shape in tensor_shapes(a).values()):,}",
        f"{a.num_layers}, {a.num_kv_heads}, {a.head_dim}",
        f"{weights / GIB:.2f} GiB",
        f"{num_bytes(a, QuantConfig(embeddings='int8')) / GIB:.2f} GiB",
        f"{num_bytes(a, QuantConfig(precision='bf16')) / GIB:.2f} GiB",
        f"{weights / STORE_SHARE / GIB:.2f} GiB",
        f"{weights / 0.8 / GIB + 1:.2f} GiB",
        f"{cache // 2048 // 1024} KiB",
        f"{16 * cache / GIB:.2f} GiB",
        f"{64 * cache / GIB:.2f} GiB",
    ]


def tables() -> list[list[list[str]]]:
    """The cells of every table, its heading and its rule left out."""
    found = re.findall(r"(?:^\|.*\n)+", TEXT, re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()[2:]]
        for table in found
    ]


def test_sizes_are_what_our_functions_say() -> None:
    of_8b, of_70b = sizes(LLAMA_8B), sizes(LLAMA_70B)
    assert [row[1:] for row in tables()[0]] == [
        list(pair) for pair in zip(of_8b, of_70b, strict=True)
    ]


def test_the_memory_for_rays_default_store_is_what_our_functions_say() -> None:
    of_8b, of_70b = (
        num_bytes(a, QuantConfig()) / STORE_SHARE / DEFAULT_OBJECT_STORE_MEMORY_PROPORTION / GIB
        for a in (LLAMA_8B, LLAMA_70B)
    )
    assert f"some {of_8b:.0f} GiB there, and a 70B model {of_70b:.0f} GiB" in TEXT


def test_the_memory_of_a_conversion_is_what_it_asks_for() -> None:
    of_8b, of_70b = (
        num_bytes(a, QuantConfig()) // a.num_layers * _LAYERS_IN_WORK / GIB
        for a in (LLAMA_8B, LLAMA_70B)
    )
    assert f"{of_8b:.2f} GiB (8B), {of_70b:.2f} GiB (70B)" in TEXT


def test_metrics_are_those_of_the_workers() -> None:
    source = (ROOT / "pipeline" / "metrics.py").read_text(encoding="utf-8")
    known = set(re.findall(r'"(quasar_\w+)"', source))
    assert len(known) >= 8
    assert set(re.findall(r"`(quasar_\w+)`", TEXT)) == known


def test_the_example_of_costs_adds_up() -> None:
    example = TEXT.partition("For example:")[2].partition("\n\n")[0].replace(",", "")
    (rate,) = re.findall(r"makes (\d+) a second", example)
    hours, of_eight = (float(found) for found in re.findall(r"([\d.]+) hours", example))
    assert hours == pytest.approx(180e6 / float(rate) / 3600, abs=0.05)
    assert of_eight == pytest.approx(180e6 / float(rate) / 3600 / 8, abs=0.05)


def test_every_flag_exists() -> None:
    ours = set[str]()
    for _, model, shortcuts in configuration.COMMANDS:
        ours |= configuration.flags(model, shortcuts)
    other = {"--config", "--json", "--follow", "--num-cpus", "--repair", "--replay", "--format"}
    other |= {"--submission-id", "--shm-size", "--generate", "--object-store-memory"}
    other |= {"--metrics-export-port"}
    named = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", TEXT))
    assert named >= {"--cluster.weights", "--num-workers", "--replay"}
    assert named - ours - other == set()


def test_relative_links_lead_somewhere() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_unequal_workers_are_understood() -> None:
    (shown,) = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    cluster: dict[str, Any] = yaml.safe_load(shown)["cluster"]
    pools = ClusterConfig.model_validate(cluster).pools
    assert [(pool.device, pool.num_workers, pool.least) for pool in pools] == [
        *(("cuda", 4, 4), ("cpu", 8, 2))
    ]
    keys = {row[0].strip("`") for table in tables() for row in table}
    assert keys >= WorkersConfig.model_fields.keys()
