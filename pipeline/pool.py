"""The workers of a run: which shard goes to whom, and what becomes of those whose process dies.

Each worker is an actor that is handed a few shards at a time, so that whoever is faster takes more. A
worker that dies is replaced, and its shards go to the next that has room: where its node is gone and no
other has room for it, the rest of the pool does its work. (Ray Data's actor pool leaves the shards of a
dead actor to that actor until it can be started again.)
"""

import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from pipeline import failpoints
from pipeline.config import ClusterConfig
from pipeline.errors import WorkerLostError
from pipeline.parts import PartReport
from pipeline.shard_worker import GenerateSettings, ShardWorker
from quant.store import WeightsRef
from workers.actor import worker_environment

_LOGGER = logging.getLogger(__name__)
_LOGS = "/tmp/ray/session_latest/logs, on each node"
_PATIENCE_SECONDS = 60.0  # Without any worker, until that is told.


@dataclass(eq=False)
class _Place:
    """A worker's place in the pool, and the actor that fills it.

    Attributes:
        is_ready: whether the actor's process is there.
        num_shards: handed to it, and not done.
        num_deaths: since a worker at this place last finished a shard.
    """

    actor: Any = None
    is_ready: bool = False
    num_shards: int = 0
    num_deaths: int = 0


@dataclass(frozen=True)
class _Call:
    """What an actor was asked for: a shard, or, where there is none, to be there."""

    place: _Place
    actor: Any
    shard: str | None


class WorkerPool:
    """Actors that generate and commit shards."""

    def __init__(
        self, weights: WeightsRef, settings: GenerateSettings, config: ClusterConfig
    ) -> None:
        """Start nothing yet. `weights` must stay alive as long as the pool."""
        self._weights, self._settings, self._config = weights, settings, config
        self._places: list[_Place] = []
        self._waiting: deque[str] = deque()
        self._calls: dict[ray.ObjectRef[Any], _Call] = {}

    def run(self, shards: Sequence[str]) -> Iterator[PartReport]:
        """Yield a report for each shard as soon as its part is in place.

        Raises:
            OSError: the output cannot be read or written any more.
            InputError: a prompt shard is damaged.
            WorkerLostError: a worker's process died, and was started again as often as it may be.
        """
        self._waiting += shards
        try:
            for _ in range(min(self._config.num_workers, len(shards))):
                self._places.append(_Place())
                self._fill(self._places[-1])
            num_left = len(shards)
            while num_left:
                self._hand_out()
                for report in self._collect():
                    num_left -= 1
                    yield report
        finally:
            for place in self._places:
                ray.kill(place.actor)

    def _fill(self, place: _Place) -> None:
        """Start an actor at a place; it may be long until a node has room for it."""
        threads = self._settings.worker.num_threads
        place.actor = (
            ray.remote(ShardWorker)
            .options(
                # Half a CPU is left to the conversion task, should its pieces have to be made again.
                num_cpus=threads - 0.5,
                num_gpus=1 if self._config.device == "cuda" else None,
                max_concurrency=self._config.shards_per_worker,
                runtime_env={"env_vars": worker_environment(threads) | _failpoint()},
            )
            .remote([self._weights], self._settings)
        )
        place.is_ready, place.num_shards = False, 0
        ready = place.actor.__ray_ready__.remote()
        self._calls[ready] = _Call(place, place.actor, None)

    def _hand_out(self) -> None:
        """Give waiting shards to those who have the fewest."""
        ready = [place for place in self._places if place.is_ready]
        while self._waiting and ready:
            place = min(ready, key=lambda p: p.num_shards)
            if place.num_shards >= self._config.shards_per_worker:
                return
            shard = self._waiting.popleft()
            place.num_shards += 1
            self._calls[place.actor.run.remote(shard)] = _Call(place, place.actor, shard)

    def _collect(self) -> Iterator[PartReport]:
        """Wait until some calls have ended; what shards became of them."""
        for call, ref in self._ended():
            place, is_current = call.place, call.actor is call.place.actor
            try:
                report = ray.get(ref)
            except RayActorError as error:
                if call.shard is not None:
                    self._waiting.appendleft(call.shard)
                if is_current:
                    self._replace(place, error)
            except RayTaskError as error:
                raise error.cause from error  # Without the traceback that Ray puts before it.
            else:
                if call.shard is None:
                    place.is_ready = True
                    continue
                place.num_shards -= is_current
                place.num_deaths = 0
                yield report

    def _ended(self) -> list[tuple[_Call, "ray.ObjectRef[Any]"]]:
        """Calls that have ended, one at least, in the order they were made."""
        since = time.monotonic()
        while True:
            refs = list(self._calls)
            some, _ = ray.wait(refs, timeout=_PATIENCE_SECONDS, fetch_local=False)
            if some:
                break
            if not any(place.is_ready for place in self._places):
                _LOGGER.warning(
                    "no node has had room for a worker (%g CPUs%s) for %d s; waiting",
                    self._settings.worker.num_threads - 0.5,
                    ", a GPU" if self._config.device == "cuda" else "",
                    time.monotonic() - since,
                )
        ended = set(ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0])
        return [(self._calls.pop(ref), ref) for ref in refs if ref in ended]

    def _replace(self, place: _Place, error: Exception) -> None:
        """Start another worker where one died."""
        place.num_deaths += 1
        if place.num_deaths > self._config.max_restarts:
            raise WorkerLostError(
                f"a worker's process died {place.num_deaths} times, more than --cluster.max_restarts "
                f"allows; what it said last is in Ray's logs ({_LOGS}); what is done stays, and the same "
                "command goes on"
            ) from error
        ray.kill(place.actor)  # It may only be out of reach.
        self._fill(place)


def _failpoint() -> dict[str, str]:
    """What a test has set here counts in the workers, too."""
    wanted = os.environ.get(failpoints.VARIABLE)
    return {failpoints.VARIABLE: wanted} if wanted else {}
