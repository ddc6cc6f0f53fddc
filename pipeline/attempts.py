"""Tries at shards, so that a row that kills its worker is found, and does not do so for ever.

A row may take its process with it: a fault in a kernel, memory that runs out. What is under way is
written down before it begins. After a death, the rows that were under way are tried again in groups, each
by itself on its worker, and those of the group that dies one by one; the row that dies alone is it.
Deaths are those of a run's workers: where the run itself was ended, nothing is held against its rows.
"""

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline import storage

_LOGGER = logging.getLogger(__name__)
_GROUP_ROWS = 16  # Enough to fill a batch, so that a careful try costs little time.


@dataclass
class Attempts:
    """What is known of the tries at one shard; rows by their index in it.

    Attributes:
        number: of tries, this one included.
        deaths: of workers, while the row was under way.
        alone: rows that were under way alone when a worker died.
        is_beside: another worker is trying the same; this try leaves no trace.
    """

    uri: str
    run: str
    number: int = 0
    deaths: dict[int, int] = field(default_factory=dict)
    alone: set[int] = field(default_factory=set)
    is_beside: bool = False

    @classmethod
    def begin(cls, output: str, shard: str, run: str, *, forgive: bool = False) -> "Attempts":
        """Count a try at a shard by a run; with `forgive`, deaths in earlier runs do not count."""
        attempts = cls(storage.join(output, "attempts", f"{shard}.json"), run)
        content = storage.read_bytes(attempts.uri)
        if content is not None:
            try:
                attempts._recall(json.loads(content), forgive=forgive)
            except (ValueError, KeyError, TypeError) as error:
                _LOGGER.warning("%s: is damaged (%s); deaths are counted anew", attempts.uri, error)
                attempts = cls(attempts.uri, run, number=1)
        attempts.number += 1
        return attempts

    @classmethod
    def beside(cls, output: str, shard: str, run: str) -> "Attempts | None":
        """A try while another worker is at it; None where a row of the shard may be deadly."""
        known = cls.begin(output, shard, "")
        if any(known.deaths.values()):
            return None
        return cls(known.uri, run, max(known.number - 1, 1), is_beside=True)

    def groups(self, rows: Sequence[int]) -> list[list[int]]:
        """The rows as they are to be tried: first, together, those that nothing is known against (there
        may be none), then the others in groups.
        """
        trusted = [row for row in rows if not self.deaths.get(row)]
        suspects = [row for row in rows if self.deaths.get(row) == 1]
        alone = [[row] for row in rows if self.deaths.get(row, 0) > 1]
        few = [suspects[i : i + _GROUP_ROWS] for i in range(0, len(suspects), _GROUP_ROWS)]
        return [trusted, *few, *alone]

    def condemned(self, rows: Iterable[int], max_attempts: int) -> list[int]:
        """The rows not to be tried again."""
        return [row for row in rows if row in self.alone and self.deaths[row] >= max_attempts]

    def start(self, rows: Sequence[int]) -> None:
        """Write down that these rows are under way, and no others."""
        if self.is_beside:
            return
        content = {
            "attempt": self.number,
            "run": self.run,
            "running": list(rows),
            "deaths": sorted(self.deaths.items()),
            "alone": sorted(self.alone),
        }
        storage.write_atomic(self.uri, json.dumps(content).encode())

    def _recall(self, known: dict[str, Any], *, forgive: bool) -> None:
        self.number = known["attempt"]
        if forgive and known["run"] != self.run:
            return
        self.deaths, self.alone = dict(known["deaths"]), set(known["alone"])
        if known["run"] == self.run:
            running: list[int] = known["running"]
            for row in running:
                self.deaths[row] = self.deaths.get(row, 0) + 1
            if len(running) == 1:
                self.alone.add(running[0])
