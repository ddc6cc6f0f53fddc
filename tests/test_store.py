"""Where a node's workers find the weights: its object store, or files of its own."""

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from quant import store
from quant.checkpoint import open_checkpoint
from quant.config import QuantConfig
from quant.convert import Piece, convert, num_bytes
from quant.errors import CheckpointError
from quant.node_copy import node_copy
from quant.store import _num_cores, convert_to_store

CONFIG = QuantConfig(recipe="rtn")


def pieces_of(folder: Path) -> list[Piece]:
    return list(convert(open_checkpoint(folder), CONFIG))


def assert_same(got: list[Piece], wanted: list[Piece]) -> None:
    assert len(got) == len(wanted)
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.keys() == theirs.keys()
        for name, array in theirs.items():
            assert ours[name].dtype == array.dtype
            assert np.array_equal(ours[name], array)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUASAR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pieces"


def test_a_node_copy_is_the_pieces_mapped_read_only(cache: Path, tiny_checkpoint: Path) -> None:
    wanted = pieces_of(tiny_checkpoint)
    got = node_copy("a" * 64, iter(wanted))
    assert_same(got, wanted)
    for piece in got:
        for array in piece.values():
            assert isinstance(array, np.memmap)
            assert not array.flags.writeable


def test_the_second_worker_reads_what_the_first_wrote(cache: Path, tiny_checkpoint: Path) -> None:
    wanted = pieces_of(tiny_checkpoint)
    node_copy("b" * 64, iter(wanted))

    def unreachable() -> Iterator[Piece]:
        raise AssertionError("the pieces were fetched again")
        yield

    assert_same(node_copy("b" * 64, unreachable()), wanted)


def test_a_copy_that_failed_leaves_nothing_and_is_made_again(
    cache: Path, tiny_checkpoint: Path
) -> None:
    wanted = pieces_of(tiny_checkpoint)

    def failing() -> Iterator[Piece]:
        yield wanted[0]
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        node_copy("c" * 64, failing())
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    assert_same(node_copy("c" * 64, iter(wanted)), wanted)


def test_workers_that_start_together_write_one_copy(cache: Path, tiny_checkpoint: Path) -> None:
    wanted = pieces_of(tiny_checkpoint)
    num_fetched = []

    def fetch() -> Iterator[Piece]:
        num_fetched.append(1)
        yield from wanted

    got: list[list[Piece]] = []
    threads = [
        threading.Thread(target=lambda: got.append(node_copy("d" * 64, fetch()))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(num_fetched) == 1
    assert len(got) == 4
    for pieces in got:
        assert_same(pieces, wanted)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        QuantConfig(recipe="rtn", head="bf16", embeddings="int8"),
        QuantConfig(precision="bf16"),
        QuantConfig(precision="float32"),
    ],
    ids=str,
)
def test_the_bytes_are_known_before(tiny_checkpoint: Path, config: QuantConfig) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint)
    made = sum(a.nbytes for piece in convert(checkpoint, config) for a in piece.values())
    # Norms, scales and padding are left out; on a model this small they count.
    assert 0.75 * made <= num_bytes(checkpoint.architecture, config) <= made


@pytest.mark.ray
def test_weights_that_no_store_can_hold_are_refused_by_numbers(
    ray_session: None, tiny_checkpoint: Path
) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint)
    # The tests' store has 200 MiB; 300 million embeddings in bfloat16 take 600 MB.
    shape = replace(checkpoint.architecture, vocab_size=300_000_000 // 64)
    large = replace(checkpoint, architecture=shape)
    reason = (
        r"weights take 0\.8\d GiB, and the object store of node .* holds 0\.\d\d GiB.*weights file"
    )
    with pytest.raises(CheckpointError, match=reason):
        convert_to_store(large, CONFIG)


def node(cpus: int, store: int, memory: int) -> dict[str, Any]:
    resources = {"CPU": cpus, "object_store_memory": store, "memory": memory}
    return {"Alive": True, "NodeManagerHostname": f"{cpus}-cpus", "Resources": resources}


def test_a_head_that_works_on_nothing_need_not_hold_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, worker, dead = node(0, 10, 10), node(4, 1000, 1000), node(8, 1, 1) | {"Alive": False}
    monkeypatch.setattr("ray.nodes", lambda: [head, worker, dead])
    store._check_stores(900)
    with pytest.raises(CheckpointError, match="node 4-cpus"):
        store._check_stores(901)


def test_weights_that_no_node_can_make_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two nodes that work, one has the memory; none at all yet is none that is too small."""
    monkeypatch.setattr("ray.nodes", lambda: [node(0, 1, 5000), node(2, 1, 10), node(2, 1, 100)])
    store._check_memory(100)
    with pytest.raises(CheckpointError, match="no node has more than"):
        store._check_memory(101)
    monkeypatch.setattr("ray.nodes", lambda: [node(0, 1, 50)])
    store._check_memory(101)


@pytest.mark.ray
def test_both_placements_hold_the_same(
    ray_session: None, cache: Path, tiny_checkpoint: Path
) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint)
    wanted = pieces_of(tiny_checkpoint)
    in_store = convert_to_store(checkpoint, CONFIG)
    in_file = convert_to_store(checkpoint, CONFIG, placement="file")
    assert in_store.digest == in_file.digest
    assert_same(in_store.attach(), wanted)
    assert_same(in_file.attach(), wanted)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [in_file.digest[:32]]
    assert in_store.wait()["recipe"]["recipe"] == "rtn"
    assert ray.get(in_file.report) == in_store.wait()


@pytest.mark.ray
def test_the_conversion_has_the_cores_that_ray_was_told_of(ray_session: None) -> None:
    @ray.remote(num_cpus=0.5)
    def count() -> tuple[int, str]:
        return _num_cores(), os.environ["OMP_NUM_THREADS"]

    told = int(ray.cluster_resources()["CPU"])
    assert told > 1
    # Ray's own choice for such a task is one.
    assert ray.get(count.remote()) == (min(told, os.cpu_count() or 1), "1")
