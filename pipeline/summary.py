"""What a run adds up to: counts and ratios, in one JSON file beside the parts."""

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline import storage
from pipeline.parts import PartReport
from workers.stats import AcceptanceStats


@dataclass(frozen=True)
class Summary:
    """Sums over parts; `seconds` from the first row's admission to the last row's end."""

    num_shards: int = 0
    num_rows: int = 0
    num_samples: int = 0
    num_errors: int = 0
    num_input_tokens: int = 0
    num_generated_tokens: int = 0
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    started_at: float = float("inf")
    finished_at: float = float("-inf")

    def add(self, report: PartReport) -> "Summary":
        """The summary with one more shard."""
        return replace(
            self,
            num_shards=self.num_shards + 1,
            num_rows=self.num_rows + report.num_rows,
            num_samples=self.num_samples + report.num_samples,
            num_errors=self.num_errors + report.num_errors,
            num_input_tokens=self.num_input_tokens + report.num_input_tokens,
            num_generated_tokens=self.num_generated_tokens + report.num_generated_tokens,
            stats=self.stats + report.stats,
            started_at=min(self.started_at, report.started_at),
            finished_at=max(self.finished_at, report.finished_at),
        )

    @property
    def error_rate(self) -> float:
        """Failed samples over all."""
        return self.num_errors / self.num_samples if self.num_samples else 0.0

    @property
    def seconds(self) -> float:
        """Length of the generation phase: prompts and answers, without start-up."""
        return max(0.0, self.finished_at - self.started_at)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the generation phase, prompts' time included."""
        return self.num_generated_tokens / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Counts, ratios and times."""
        stats = self.stats
        return {
            "num_shards": self.num_shards,
            "num_rows": self.num_rows,
            "num_samples": self.num_samples,
            "num_errors": self.num_errors,
            "num_input_tokens": self.num_input_tokens,
            "num_generated_tokens": self.num_generated_tokens,
            "generation_seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "num_steps": stats.num_steps,
            "num_spec_steps": stats.num_spec_steps,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
            "acceptance_histogram": list(stats.histogram),
            "mean_acceptance_length": stats.mean_acceptance_length,
            "draft_acceptance_rate": stats.draft_acceptance_rate,
        }


def sum_reports(reports: Iterable[PartReport]) -> Summary:
    """What parts add up to."""
    return functools.reduce(Summary.add, reports, Summary())


def write_summary(output: str, summary: Summary, run: dict[str, Any]) -> None:
    """Write OUT/summary.json: the sums, and what the run says of itself."""
    content = json.dumps(summary.to_dict() | run, indent=2)
    storage.write_atomic(storage.join(output, "summary.json"), content.encode())
