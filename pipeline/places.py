"""A worker's place in the pool: the actor that fills it, what it has in hand, and how fast it is."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from pipeline import failpoints
from pipeline.cluster import WorkersConfig
from pipeline.shard_task import GenerateSettings
from pipeline.shard_worker import ShardWorker, WorkerState
from quant.store import WeightsRef
from workers.actor import worker_environment

_OVERDUE = 1.5  # Times as long as expected: from here on, expectations are of no use.
_ASIDE = 3  # Calls beside the shards that an actor answers at once.


@dataclass(frozen=True)
class Kind:
    """Workers that are alike: what they are asked for, and the threads of each."""

    config: WorkersConfig
    num_threads: int

    @property
    def needs(self) -> dict[str, float]:
        """The resources of Ray that each takes."""
        # Half a CPU is left to the conversion task, should its pieces have to be made again.
        needs = {"CPU": self.num_threads - 0.5} | self.config.resources
        if self.config.device != "cpu":
            needs |= {"GPU" if self.config.device == "cuda" else "NPU": 1.0}
        return needs

    def start(self, weights: WeightsRef, settings: GenerateSettings, num_shards: int) -> Any:
        """Start an actor that answers so many shards at once; it may be long until a node has room."""
        needs = self.needs
        options: dict[str, Any] = {
            "num_cpus": needs.pop("CPU"),
            "num_gpus": needs.pop("GPU", None),
            "resources": needs,
            "max_concurrency": num_shards + _ASIDE,
            "runtime_env": {"env_vars": worker_environment(self.num_threads) | _failpoint()},
        }
        mine = replace(settings.worker, device=self.config.device, num_threads=self.num_threads)
        actor = ray.remote(ShardWorker).options(**options)
        return actor.remote([weights], replace(settings, worker=mine))

    def __str__(self) -> str:
        others = [f"{n:g} {name}" for name, n in self.needs.items() if name != "CPU"]
        return ", ".join([f"{self.num_threads} CPU", *others])


@dataclass(eq=False)
class Place:
    """A worker's place, and the actor that fills it.

    Attributes:
        number: of the kind that it is of.
        is_ready: whether the actor's process is there.
        shards: in its hands, in the order they came, with the rows of each.
        num_deaths: since a worker at this place last finished a shard.
        state: what it said of itself last; `looked`, when that was asked for (monotonic); `is_asked`, and
            has not answered yet.
    """

    number: int
    actor: Any = None
    is_ready: bool = False
    shards: dict[str, int] = field(default_factory=dict)
    num_deaths: int = 0
    num_done: int = 0
    state: WorkerState | None = None
    looked: float = 0.0
    is_asked: bool = False
    since: float = field(default_factory=time.monotonic)  # It finished something, or had nothing.
    _seconds: float = 0.0
    _rows: int = 0

    def take(self, shard: str, num_rows: int) -> None:
        """A shard comes into its hands."""
        if not self.shards:
            self.since = time.monotonic()
        self.shards[shard] = num_rows

    def finish(self, shard: str) -> None:
        """A shard is done: the time since the one before was spent on it."""
        now = time.monotonic()
        self._seconds += now - self.since
        self._rows += self.shards.pop(shard)
        self.since, self.num_deaths = now, 0
        self.num_done += 1

    def reset(self, actor: Any) -> None:
        """Another actor, with nothing in its hands."""
        self.actor, self.is_ready, self.state, self.is_asked = actor, False, None, False
        self.shards.clear()

    @property
    def seconds_per_row(self) -> float | None:
        """Its pace; None until it has finished something."""
        return self._seconds / self._rows if self._rows else None

    def seconds_left(self, shard: str, pace: float) -> float:
        """When it is likely to have done a shard, at so many seconds a row: it does one after another.

        Overdue, it is taken to need as long as it has been waited for.
        """
        rows = 0
        for name, num_rows in self.shards.items():
            rows += num_rows
            if name == shard:
                break
        waited = time.monotonic() - self.since
        first = next(iter(self.shards.values())) * pace
        return rows * pace - waited if waited < _OVERDUE * first else max(rows * pace, waited)


def mean_pace(places: list[Place]) -> float | None:
    """Seconds a row of those that have finished something; None if none has."""
    paces = [place.seconds_per_row for place in places]
    known = [pace for pace in paces if pace is not None]
    return sum(known) / len(known) if known else None


def last_shards(places: list[Place], mean: float) -> list[tuple[float, str]]:
    """The shard that each will be done with last, with the seconds until then; the latest at the end."""
    return sorted(
        (place.seconds_left(shard, place.seconds_per_row or mean), shard)
        for place in places
        for shard in list(place.shards)[-1:]
    )


def room_on(node: Mapping[str, float], needs: Mapping[str, float]) -> bool:
    """Whether a node with these resources could hold a worker that needs those, were it empty."""
    return all(node.get(name, 0) >= amount for name, amount in needs.items())


def _failpoint() -> dict[str, str]:
    """What a test has set here counts in the workers, too."""
    wanted = os.environ.get(failpoints.VARIABLE)
    return {failpoints.VARIABLE: wanted} if wanted else {}
