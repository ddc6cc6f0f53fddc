"""Converted weights in Ray's object store: made once by one task, attached by every actor.

The pieces are return values of a task that the driver submits, so the driver owns them and Ray can
make a lost one again from its lineage (conversion is deterministic). They are numpy buffers, so every
process of a node reads the same shared memory.
"""

from dataclasses import dataclass
from typing import Any, cast

import ray
from ray.exceptions import RayTaskError

from quant.architecture import Architecture
from quant.checkpoint import Checkpoint
from quant.config import QuantConfig
from quant.convert import Piece, convert, num_pieces, weights_digest
from quant.errors import CheckpointError


@dataclass(frozen=True)
class WeightsRef:
    """Weights in the object store. Whoever made it must keep it alive for the job's length.

    The references sit in a field, not in a task's arguments: Ray would pin plain arguments, and would
    fail to restart an actor whose constructor arguments were evicted (ray#53727).
    """

    architecture: Architecture
    digest: str
    pieces: tuple["ray.ObjectRef[Piece]", ...]
    done: "ray.ObjectRef[bool]"

    def wait(self) -> None:
        """Wait for the conversion; raises CheckpointError if it found the weights unusable."""
        try:
            ray.get(self.done)
        except RayTaskError as error:
            if isinstance(error.cause, CheckpointError):
                raise error.cause from error
            raise

    def attach(self) -> list[Piece]:
        """Read-only views of the pieces in shared memory; waits for the conversion to end."""
        return ray.get(list(self.pieces))


def convert_to_store(checkpoint: Checkpoint, config: QuantConfig) -> WeightsRef:
    """Submit the one conversion task; returns at once with references to its pieces."""
    task = _convert_task.options(num_returns=num_pieces(checkpoint) + 1, name="convert")
    refs = cast("list[ray.ObjectRef[Any]]", task.remote(checkpoint, config))
    *pieces, done = refs
    digest = weights_digest(checkpoint, config)
    return WeightsRef(checkpoint.architecture, digest, tuple(pieces), done)


# A generator with a fixed number of returns: Ray stores each piece as it is yielded, so the task
# never holds more than one layer beside what it is reading.
@ray.remote(num_cpus=0.5, max_retries=3)
def _convert_task(checkpoint: Checkpoint, config: QuantConfig):  # type: ignore[no-untyped-def]
    yield from convert(checkpoint, config)
    yield True
