"""How a run is doing while it runs: in OUT/progress.json, and for whoever shows it."""

import json
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pipeline import storage
from pipeline.summary import Summary

if TYPE_CHECKING:
    from pipeline.places import Place

_LOGGER = logging.getLogger(__name__)

FILE = "progress.json"
STALE_SECONDS = 60.0  # Without news, a run is taken for dead.
_SECONDS, _REMOTE_SECONDS = 2.0, 10.0  # Between two versions of the file.
_WINDOW_SECONDS = 60.0  # That "now" is long.

Phase = Literal["planning", "starting", "generating", "complete", "stopped"]
ENDED: tuple[Phase, ...] = ("complete", "stopped")


@dataclass(frozen=True)
class WorkerProgress:
    """A worker: its rows under way of those it has room for, those that wait, what it has done."""

    name: str
    num_rows: int
    num_slots: int
    num_waiting: int
    num_tokens: int
    num_shards: int


@dataclass(frozen=True)
class Progress:
    """A run at a moment. What is under way counts, with its samples and tokens, as far as it is told.

    Attributes:
        at: when this was so (seconds since the epoch).
        num_rows: in place; `num_samples` are answered, or refused, or failed.
        tokens_per_second: of the last minute; at the end, of the run.
        seconds_left: at the pace of the last minute; None as long as there is none.
        num_starting: workers that are not there yet.
    """

    at: float
    phase: Phase
    num_rows: int = 0
    num_rows_planned: int | None = None
    num_samples: int = 0
    num_errors: int = 0
    num_generated_tokens: int = 0
    tokens_per_second: float = 0.0
    mean_acceptance_length: float | None = None
    draft_acceptance_rate: float | None = None
    seconds_left: float | None = None
    num_starting: int = 0
    workers: tuple[WorkerProgress, ...] = ()

    def to_json(self) -> str:
        """One line of JSON, with every worker."""
        return json.dumps(asdict(self))

    def to_line(self) -> str:
        """One line of JSON for a log: the workers are counted."""
        return json.dumps(asdict(self) | {"workers": len(self.workers)})

    @classmethod
    def from_json(cls, content: bytes) -> "Progress":
        """What `to_json` wrote; raises ValueError, KeyError or TypeError if it is not that."""
        raw = json.loads(content)
        raw["workers"] = tuple(WorkerProgress(**worker) for worker in raw["workers"])
        return cls(**raw)


@dataclass
class Course:
    """What the driver knows of its run; it writes, and `look` reads, in a thread of its own.

    Attributes:
        total: of the parts in place, and `before` when the run began.
        places: of the workers.
    """

    phase: Phase = "planning"
    num_rows_planned: int | None = None
    before: Summary = field(default_factory=Summary)
    total: Summary = field(default_factory=Summary)
    places: "Sequence[Place]" = ()
    _told: "dict[Place, tuple[Any, Counter[str]]]" = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter)
    _past: deque[tuple[float, int, int]] = field(default_factory=deque)

    def look(self) -> Progress:
        """How the run is doing."""
        now, total = time.time(), self.total
        workers = self._ask(list(self.places))
        done = self._counts
        num_samples = max(total.num_samples, self.before.num_samples + done["num_samples"])
        num_tokens = max(
            total.num_generated_tokens, self.before.num_generated_tokens + done["num_tokens"]
        )
        self._past.append((now, num_samples, num_tokens))
        while now - self._past[0][0] > _WINDOW_SECONDS:
            self._past.popleft()
        is_over = self.phase in ENDED
        length, rate = self._drafts()
        return Progress(
            at=round(now, 3),
            phase="generating" if self.phase == "starting" and num_tokens else self.phase,
            num_rows=total.num_rows,
            num_rows_planned=self.num_rows_planned,
            num_samples=total.num_samples if is_over else num_samples,
            num_errors=total.num_errors,
            num_generated_tokens=total.num_generated_tokens if is_over else num_tokens,
            tokens_per_second=round(self._mean() if is_over else self._pace(2), 1),
            mean_acceptance_length=length,
            draft_acceptance_rate=rate,
            seconds_left=None if is_over else self._seconds_left(num_samples),
            num_starting=0 if is_over else sum(not place.is_ready for place in self.places),
            workers=() if is_over else tuple(workers),
        )

    def _ask(self, places: "Sequence[Place]") -> list[WorkerProgress]:
        """What the workers said last; what is new of it is added to the counts."""
        workers = []
        for place in places:
            if (state := place.state) is None:
                continue
            now = Counter(state.counts)
            actor, before = self._told.get(place, (None, Counter()))
            self._counts += now - before if actor is place.actor else now
            self._told[place] = place.actor, now
            workers.append(
                WorkerProgress(
                    state.name,
                    now["num_rows"],
                    now["num_slots"],
                    now["num_waiting"],
                    now["num_tokens"],
                    place.num_done,
                )
            )
        return workers

    def _drafts(self) -> tuple[float | None, float | None]:
        """Acceptance length and rate of all parts, or of what is under way as long as there are none."""
        stats, counts = self.total.stats, self._counts
        if stats.num_steps or self.phase in ENDED or not counts["num_spec_steps"]:
            return stats.mean_acceptance_length, stats.draft_acceptance_rate
        accepted = counts["num_accepted_draft_tokens"]
        return 1 + accepted / counts["num_spec_steps"], accepted / counts["num_draft_tokens"]

    def _mean(self) -> float:
        """Tokens a second of this run, as its parts have it."""
        seconds = self.total.seconds - self.before.seconds
        num_tokens = self.total.num_generated_tokens - self.before.num_generated_tokens
        return num_tokens / seconds if seconds > 0 else 0.0

    def _pace(self, of: int) -> float:
        """Samples (1) or tokens (2) a second, of late."""
        first, last = self._past[0], self._past[-1]
        seconds = last[0] - first[0]
        return max(0.0, (last[of] - first[of]) / seconds) if seconds else 0.0

    def _seconds_left(self, num_samples: int) -> float | None:
        pace = self._pace(1)
        if not pace or not self.num_rows_planned:
            return None
        per_row = self.total.num_samples / self.total.num_rows if self.total.num_rows else 1.0
        return round(max(0.0, self.num_rows_planned * per_row - num_samples) / pace, 1)


class Watch:
    """A thread that looks at a run every few seconds, writes down what it sees, and shows it."""

    def __init__(self, output: str, course: Course, show: Callable[[Progress], None]) -> None:
        """Begin at once."""
        self._uri, self._course, self._show = storage.join(output, FILE), course, show
        self._pause = _SECONDS if storage.is_local(output) else _REMOTE_SECONDS
        self._is_over = threading.Event()
        self._is_told = False
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write down how it ended."""
        self._is_over.set()
        self._thread.join()
        if self._course.phase not in ENDED:
            self._course.phase = "stopped"
        self._look(is_shown=kind is None)  # Else the error is what is shown.

    def _run(self) -> None:
        self._look()
        while not self._is_over.wait(self._pause):
            self._look()

    def _look(self, *, is_shown: bool = True) -> None:
        progress = self._course.look()
        try:
            storage.write_atomic(self._uri, progress.to_json().encode())
        except OSError as error:
            if not self._is_told:
                _LOGGER.warning("%s: cannot be written (%s)", self._uri, error)
                self._is_told = True
        if is_shown:
            self._show(progress)


def read_progress(output: str) -> Progress | None:
    """What OUT/progress.json says; None if there is none, or one of another make. Raises OSError."""
    content = storage.read_bytes(storage.join(output, FILE))
    try:
        return None if content is None else Progress.from_json(content)
    except (ValueError, KeyError, TypeError):
        return None
