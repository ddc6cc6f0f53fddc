"""Converted weights in Ray's object store: made once by one task, attached by every actor.

The pieces are return values of a task that the driver submits, so the driver owns them and Ray can
make a lost one again from its lineage (conversion is deterministic). They are numpy buffers, so every
process of a node reads the same shared memory.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import ray
import torch
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quant.architecture import Architecture
from quant.calibrate import Text
from quant.checkpoint import Checkpoint
from quant.config import QuantConfig
from quant.convert import Piece, convert, num_bytes, num_pieces
from quant.errors import CheckpointError
from quant.node_copy import node_copy
from quant.prepare import prepared, recipe_digest, report_of, weights_digest

Placement = Literal["object_store", "file"]
STORE_SHARE = 0.9
_LAYERS_IN_WORK = 8  # What conversion and calibration hold in memory at a time, in int8 layers.


@dataclass(frozen=True)
class WeightsRef:
    """Weights in the object store. Whoever made it must keep it alive for the job's length.

    The references sit in a field, not in a task's arguments: Ray would pin plain arguments, and would
    fail to restart an actor whose constructor arguments were evicted (ray#53727).
    """

    architecture: Architecture
    digest: str
    pieces: tuple["ray.ObjectRef[Piece]", ...]
    report: "ray.ObjectRef[dict[str, Any]]"
    recipe: str
    placement: Placement = "object_store"

    def wait(self) -> dict[str, Any]:
        """How the weights were made (see `quant.prepare`), once they are; empty if nothing is known.

        Raises:
            CheckpointError: the conversion found the checkpoint unusable.
        """
        try:
            return ray.get(self.report)
        except RayTaskError as error:
            if isinstance(error.cause, CheckpointError):
                raise error.cause from error
            raise

    def attach(self) -> list[Piece]:
        """Read-only views of the pieces in shared memory; waits for the conversion to end."""
        if self.placement == "file":
            return node_copy(self.digest, (ray.get(ref) for ref in self.pieces))
        return ray.get(list(self.pieces))

    def send(self) -> "list[ray.ObjectRef[None]]":
        """Let every node that may get a worker fetch the pieces, once, as soon as they are there.

        The workers of a node that start at a time find them then. Returns what to keep until they do.
        """
        nodes = working_nodes()
        if len(nodes) == 1:
            return []
        return [
            _fetch_task.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote([self])
            for node in nodes
        ]


def convert_to_store(
    checkpoint: Checkpoint,
    config: QuantConfig,
    texts: Sequence[Text] = (),
    placement: Placement = "object_store",
) -> WeightsRef:
    """Submit the one conversion task; returns at once with references to its pieces.

    Args:
        checkpoint: the source, in floating point or quantized.
        config: the recipe.
        texts: to calibrate on, if the recipe does.
        placement: where a node's workers read the pieces: in its object store, or in a file of its own.

    Raises:
        CheckpointError: some node's object store cannot hold the weights, or none has the memory to make
            them.
    """
    needed = num_bytes(checkpoint.architecture, config)
    if placement == "object_store":
        _check_stores(needed)
    memory = needed // checkpoint.architecture.num_layers * _LAYERS_IN_WORK
    _check_memory(memory)
    recipe = recipe_digest(checkpoint, config, texts)
    num_returns = num_pieces(checkpoint) + 1
    task = _convert_task.options(num_returns=num_returns, memory=memory, name="convert")
    refs = cast("list[ray.ObjectRef[Any]]", task.remote(checkpoint, config, texts, recipe))
    *pieces, report = refs
    digest = weights_digest(config, recipe)
    return WeightsRef(checkpoint.architecture, digest, tuple(pieces), report, recipe, placement)


def _check_stores(needed: int) -> None:
    """Every node may get a worker, and its store must hold the weights beside what passes through."""
    for node in working_nodes():
        size = int(node["Resources"].get("object_store_memory", 0))
        if needed > STORE_SHARE * size:
            raise CheckpointError(
                f"the weights take {needed / 2**30:.2f} GiB, and the object store of node "
                f"{node['NodeManagerHostname']} holds {size / 2**30:.2f} GiB: start Ray with a larger "
                "--object-store-memory, or set --cluster.weights file"
            )


def _check_memory(needed: int) -> None:
    """One node at least must be able to make the weights; Ray would wait for it for ever."""
    nodes = working_nodes()
    most = max((int(node["Resources"].get("memory", 0)) for node in nodes), default=needed)
    if needed > most:
        raise CheckpointError(
            f"making the weights takes {needed / 2**30:.2f} GiB of memory, and no node has more than "
            f"{most / 2**30:.2f} GiB: start Ray with a larger --memory, or on a larger node"
        )


def working_nodes() -> list[dict[str, Any]]:
    """The nodes that may get work; a head without CPUs gets none."""
    return [n for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) > 0]


@ray.remote(num_cpus=0, max_retries=0)
def _fetch_task(weights: Sequence[WeightsRef]) -> None:
    weights[0].attach()


# A generator with a fixed number of returns: Ray stores each piece as it is yielded, so the task
# never holds more than one layer beside what it is reading.
@ray.remote(num_cpus=0.5, max_retries=3)
def _convert_task(checkpoint: Checkpoint, config: QuantConfig, texts: Sequence[Text], recipe: str):  # type: ignore[no-untyped-def]
    # Ray gives a task of half a core one thread; but until there are weights, the node has nothing
    # else to do.
    torch.set_num_threads(_num_cores())
    with prepared(checkpoint, config, texts, recipe) as source:
        yield from convert(source, config)
        yield report_of(source, config)


def _num_cores() -> int:
    """The cores of this node that Ray was told of, as far as they exist."""
    here = ray.get_runtime_context().get_node_id()
    told = [node["Resources"].get("CPU", 1) for node in ray.nodes() if node["NodeID"] == here]
    return max(1, min(int(told[0]), os.cpu_count() or 1))
