"""What a worker is told, and a shard in its hands."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipeline.attempts import Attempts
from pipeline.duplicates import Duplicates
from pipeline.parts import Provenance, shared_row
from workers.actor import WorkerSettings
from workers.config import SamplingParams


@dataclass(frozen=True)
class GenerateSettings:
    """What a worker needs to know beside its weights.

    `run` names the run, `retry` says that shards have parts whose failed rows are to be tried again.
    """

    output: str
    run: str
    retry: bool
    sampling: SamplingParams
    seed: int
    max_attempts_per_row: int
    provenance: Provenance
    carried: str
    worker: WorkerSettings


@dataclass(frozen=True)
class ShardTask:
    """A shard in work: its rows, and what is known of its tries and its answers."""

    shard: str
    plan: pa.Table
    rows: list[dict[str, Any]]
    attempts: Attempts
    answered: list[tuple[int, dict[str, Any]]]
    common: dict[str, Any]
    duplicates: Duplicates

    def unanswered(self) -> list[int]:
        """The rows without an answer."""
        done = {index for index, _ in self.answered}
        return [index for index in range(len(self.rows)) if index not in done]

    def todo(self) -> list[int]:
        """Those of them that are to be generated here, as far as known."""
        return self.duplicates.generated(self.unanswered())

    def share(self) -> None:
        """Give the rows that are left the answers of the shard's rows that they equal."""
        of_first = defaultdict(list)
        for index, answer in self.answered:
            of_first[index].append(answer)
        for index in self.unanswered():
            for answer in of_first[self.duplicates.firsts[index]]:
                self.answered.append((index, shared_row(answer, self.rows[index])))
