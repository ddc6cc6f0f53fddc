"""What a run adds up to: counts and ratios, in one JSON file beside the parts."""

import functools
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline import storage
from pipeline.parts import PartReport
from workers.stats import AcceptanceStats


@dataclass(frozen=True)
class Summary:
    """Sums over parts; `spans` are the times (since the epoch) in which some part was worked on."""

    num_shards: int = 0
    num_rows: int = 0
    num_samples: int = 0
    num_errors: int = 0
    num_shared: int = 0
    num_input_tokens: int = 0
    num_generated_tokens: int = 0
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    spans: tuple[tuple[float, float], ...] = ()

    def add(self, report: PartReport) -> "Summary":
        """The summary with one more shard."""
        return replace(
            self,
            num_shards=self.num_shards + 1,
            num_rows=self.num_rows + report.num_rows,
            num_samples=self.num_samples + report.num_samples,
            num_errors=self.num_errors + report.num_errors,
            num_shared=self.num_shared + report.num_shared,
            num_input_tokens=self.num_input_tokens + report.num_input_tokens,
            num_generated_tokens=self.num_generated_tokens + report.num_generated_tokens,
            stats=self.stats + report.stats,
            spans=_with_span(self.spans, report.started_at, report.finished_at),
        )

    @property
    def error_rate(self) -> float:
        """Failed samples over all."""
        return self.num_errors / self.num_samples if self.num_samples else 0.0

    @property
    def seconds(self) -> float:
        """Length of the generation phase: prompts and answers, without start-up and pauses."""
        return sum(end - start for start, end in self.spans)

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
            "num_shared": self.num_shared,
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


def _with_span(
    spans: tuple[tuple[float, float], ...], start: float, end: float
) -> tuple[tuple[float, float], ...]:
    """The spans, apart and in order, with one more; those that overlap become one."""
    first = bisect_left(spans, start, key=lambda span: span[1])
    last = bisect_right(spans, end, key=lambda span: span[0])
    for other in spans[first:last]:
        start, end = min(start, other[0]), max(end, other[1])
    return (*spans[:first], (start, end), *spans[last:])


def sum_reports(reports: Iterable[PartReport]) -> Summary:
    """What parts add up to."""
    return functools.reduce(Summary.add, reports, Summary())


def describe_drafts(length: float | None, rate: float | None) -> str:
    """What drafting came to, for people: mean acceptance length and draft acceptance rate."""
    if length is None or rate is None:
        return "none drafted"
    return f"{length:.2f} tokens per drafted step, {rate:.0%} of the drafted tokens accepted"


def read_summary(output: str) -> dict[str, Any]:
    """What OUT/summary.json says; empty if there is none."""
    content = storage.read_bytes(storage.join(output, "summary.json"))
    try:
        summary = json.loads(content or b"{}")
    except ValueError:
        return {}
    return summary if isinstance(summary, dict) else {}


def write_summary(output: str, summary: Summary, run: dict[str, Any]) -> None:
    """Write OUT/summary.json: the sums, and what the run says of itself."""
    content = json.dumps(summary.to_dict() | run, indent=2)
    storage.write_atomic(storage.join(output, "summary.json"), content.encode())
