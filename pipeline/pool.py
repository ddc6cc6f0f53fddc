"""The workers of a run: which shard goes to whom, and what becomes of those whose process dies.

Each worker is an actor that is handed a few shards at a time, so that whoever is faster takes more. A
worker that dies is replaced, and its shards go to the next that has room: where its node is gone and no
other has room for it, the rest of the pool does its work. (Ray Data's actor pool leaves the shards of a
dead actor to that actor until it can be started again.)

Once no shard waits, who has nothing to do is given a shard that another, slower one would finish later,
and the part that is there first stays (the backup tasks of MapReduce, Dean and Ghemawat 2004).
"""

import logging
import queue
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.exceptions import RayActorError, RayTaskError

from pipeline.cluster import ClusterConfig
from pipeline.errors import WorkerLostError
from pipeline.parts import PartReport
from pipeline.places import Kind, Place, last_shards, mean_pace
from pipeline.probe import Probe
from pipeline.shard_task import GenerateSettings
from quant.store import WeightsRef

_LOGGER = logging.getLogger(__name__)
_LOGS = "/tmp/ray/session_latest/logs, on each node"
_PATIENCE_SECONDS = 60.0  # Without any worker, until that is told.
_TICK_SECONDS = 0.5
_LOOK_SECONDS = 2.0  # Between two questions how a worker is doing; longer where they are very many:
_LOOKS_PER_SECOND = 100
_IDLE_SECONDS = 10.0  # Until a worker that is not needed any more is let go.


@dataclass(frozen=True, eq=False)
class _Call:
    """What an actor was asked for: to be there, a shard, how it is doing, or a few answers."""

    what: Literal["ready", "run", "state", "probe"]
    place: Place
    actor: Any
    shard: str = ""


class WorkerPool:
    """Actors that generate and commit shards.

    Attributes:
        places: of the workers that there are, or that are waited for.
        probe: whether the kinds of workers answer alike.
        issued_twice: shards that were given to a second worker, too.
    """

    def __init__(
        self,
        weights: WeightsRef,
        settings: GenerateSettings,
        config: ClusterConfig,
        kinds: Sequence[Kind],
    ) -> None:
        """Start nothing yet. `weights` must stay alive as long as the pool."""
        self._weights, self._settings, self._config, self.kinds = weights, settings, config, kinds
        self.places: list[Place] = []
        self.probe = Probe([f"{kind.config.device} ({kind})" for kind in kinds])
        self.issued_twice: set[str] = set()
        self._rows: dict[str, int] = {}
        self._sizes: Counter[int] = Counter()  # Of the kinds, by their numbers.
        self._left: set[str] = set()  # Shards without a part.
        self._waiting: deque[str] = deque()
        self._open: set[Place] = set()  # With room for a shard.
        self._tries: dict[str, set[Place]] = {}
        self._fragile: set[str] = set()  # Shards with which a worker died.
        self._done: queue.SimpleQueue[tuple[_Call, Future[Any]]] = queue.SimpleQueue()
        self._ticked = time.monotonic()
        self._had_worker = dict.fromkeys(range(len(kinds)), self._ticked)

    def run(self, shards: Mapping[str, int]) -> Iterator[PartReport]:
        """Yield a report for each shard as soon as its part is in place; they come with their rows.

        Raises:
            OSError: the output cannot be read or written any more.
            InputError: a prompt shard is damaged.
            WorkerLostError: a worker's process died, and was started again as often as it may be.
        """
        self._rows = dict(shards)
        self._waiting += shards
        self._left = set(shards)
        try:
            self._begin()
            while self._left:
                self._hand_out()
                for call, outcome in self._ended():
                    report = self._take(call, outcome)
                    if report is not None and call.shard in self._left:
                        self._left.remove(call.shard)
                        yield report
        finally:
            for place in self.places:
                ray.kill(place.actor)

    def _begin(self) -> None:
        """Start as many workers of each kind as there are to be, and no more than there are shards."""
        for number, kind in enumerate(self.kinds):
            for _ in range(kind.config.least):
                if len(self.places) < len(self._rows):
                    self._add(number)
        self._sent = self._weights.send()
        self._probe_of = next(iter(self._rows), "")

    def _add(self, number: int) -> None:
        self.places.append(Place(number))
        self._sizes[number] += 1
        self._fill(self.places[-1])

    def _fill(self, place: Place) -> None:
        """Start an actor at a place; it may be long until a node has room for it."""
        place.reset(
            self.kinds[place.number].start(
                self._weights, self._settings, self._config.shards_per_worker
            )
        )
        self._note(place)
        self._call(_Call("ready", place, place.actor), place.actor.__ray_ready__.remote())

    def _call(self, call: _Call, ref: "ray.ObjectRef[Any]") -> None:
        future: Future[Any] = ref.future()
        future.add_done_callback(lambda ended: self._done.put((call, ended)))

    def _give(self, place: Place, shard: str, *, is_backup: bool = False) -> None:
        place.take(shard, self._rows[shard])
        self._note(place)
        self._tries.setdefault(shard, set()).add(place)
        call = _Call("run", place, place.actor, shard)
        self._call(call, place.actor.run.remote(shard, is_backup=is_backup))

    def _hand_out(self) -> None:
        """Give waiting shards to those who have the fewest; ask for more workers if none has room."""
        while self._waiting and self._open:
            place = min(self._open, key=lambda p: len(p.shards))
            self._give(place, self._waiting.popleft())
        if self._waiting:
            self._grow()

    def _note(self, place: Place) -> None:
        """Whether a place has room for a shard."""
        if place.is_ready and len(place.shards) < self._config.shards_per_worker:
            self._open.add(place)
        else:
            self._open.discard(place)

    def _grow(self) -> None:
        """Twice as many of a kind, once all that were asked for are there: as far as the work goes."""
        wanted = -(-len(self._waiting) // self._config.shards_per_worker)
        for number, kind in enumerate(self.kinds):
            if self._sizes[number] >= kind.config.num_workers:
                continue
            mine = [place for place in self.places if place.number == number]
            if all(place.is_ready for place in mine):
                room = kind.config.num_workers - len(mine)
                for _ in range(min(wanted, room, max(1, len(mine)))):
                    self._add(number)
                    wanted -= 1

    def _take(self, call: _Call, outcome: "Future[Any]") -> PartReport | None:
        """What became of a call: the report of a shard that is done, if it was about one."""
        place, is_current = call.place, call.actor is call.place.actor
        try:
            result = outcome.result()
        except RayActorError as error:
            if call.what == "run":
                self._fragile.add(call.shard)
                self._end_try(call)
            if is_current:
                self._replace(place, error)
        except RayTaskError as error:
            raise error.cause from error  # Without the traceback that Ray puts before it.
        else:
            if call.what == "run":
                return self._finish(call, result, is_current=is_current)
            if is_current:
                self._hear(call, result)
        return None

    def _finish(
        self, call: _Call, report: PartReport | None, *, is_current: bool
    ) -> PartReport | None:
        """A try has ended; without a report where it was a backup, and the shard may be deadly."""
        if report is None:
            self._fragile.add(call.shard)
        self._end_try(call, is_done=report is not None)
        if is_current:
            if report is None:
                call.place.shards.pop(call.shard)
            else:
                call.place.finish(call.shard)
            self._note(call.place)
        return report

    def _hear(self, call: _Call, result: Any) -> None:
        place = call.place
        if call.what == "state":
            place.state, place.is_asked = result, False
        elif call.what == "probe":
            self.probe.hear(place.number, result)
        else:
            place.is_ready, place.since = True, time.monotonic()
            self._note(place)
            if self.probe.wants(place.number):
                ref = place.actor.probe.remote(self._probe_of)
                self._call(_Call("probe", place, place.actor), ref)

    def _end_try(self, call: _Call, *, is_done: bool = False) -> None:
        """A try has ended; the shard waits again, unless it is done, or another worker is at it."""
        tries = self._tries[call.shard]
        tries.discard(call.place)
        if not tries and not is_done and call.shard in self._left:
            self._waiting.appendleft(call.shard)

    def _ended(self) -> Iterator[tuple[_Call, "Future[Any]"]]:
        """Calls that have ended, in the order they did; after a while without, none."""
        try:
            yield self._done.get(timeout=_TICK_SECONDS)
            while True:
                yield self._done.get_nowait()
        except queue.Empty:
            if time.monotonic() - self._ticked >= _TICK_SECONDS:
                self._tick()

    def _tick(self) -> None:
        """From time to time: ask how workers do, help the slow ones, let idle ones go, complain."""
        now = self._ticked = time.monotonic()
        pause = max(_LOOK_SECONDS, len(self.places) / _LOOKS_PER_SECOND)
        for place in self.places:
            if place.is_ready and not place.is_asked and now - place.looked >= pause:
                place.looked, place.is_asked = now, True
                self._call(_Call("state", place, place.actor), place.actor.state.remote())
        if not self._waiting:
            idle = [place for place in self.places if not place.shards]
            helping = self._back_up([place for place in idle if place.is_ready])
            for place in idle:
                if place not in helping:
                    self._let_go(place)
        for number, kind in enumerate(self.kinds):
            ready = [place.is_ready for place in self.places if place.number == number]
            if any(ready) or not ready:
                self._had_worker[number] = now
            elif now - self._had_worker[number] >= _PATIENCE_SECONDS:
                _LOGGER.warning("no node has had room for a worker (%s) for a while; waiting", kind)
                self._had_worker[number] = now

    def _back_up(self, idle: Sequence[Place]) -> set[Place]:
        """Let who has nothing to do have what another would finish last, and later than it; who helps.

        Not where there are parts that are to be replaced: the new one would be taken for an old one.
        """
        mean = mean_pace(self.places)
        if not idle or mean is None or self._settings.retry:
            return set()
        taboo = self._fragile | self.issued_twice
        late = [item for item in last_shards(self.places, mean) if item[1] not in taboo]
        helping = set()
        for place in idle:
            seconds, shard = late.pop() if late else (0.0, "")
            if not shard or seconds <= self._rows[shard] * (place.seconds_per_row or mean):
                break
            _LOGGER.info("shard %s: issued again, to a worker with nothing to do", shard)
            self.issued_twice.add(shard)
            self._give(place, shard, is_backup=True)
            helping.add(place)
        return helping

    def _let_go(self, place: Place) -> None:
        """End a worker that is not needed, if there are more than there must be: it costs money."""
        if self._sizes[place.number] <= self.kinds[place.number].config.least:
            return
        if not place.is_ready or time.monotonic() - place.since >= _IDLE_SECONDS:
            self.places.remove(place)
            self._sizes[place.number] -= 1
            self._open.discard(place)
            ray.kill(place.actor)
            place.actor = None  # What it was asked for is of no interest any more.

    def _replace(self, place: Place, error: Exception) -> None:
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
