"""Who generated what when: samples as spans of time, by worker, and what can be told of that."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa

from pipeline.sums import numbers
from workers.step_times import StepTimes

_MOST_INTERVALS = 4000
_LEAST_SHARE = 1 / 3


@dataclass(frozen=True)
class Spans:
    """When which samples were generated, and what that took: arrays [n], times since the epoch."""

    starts: np.ndarray
    ends: np.ndarray
    tokens: np.ndarray
    prompt_tokens: np.ndarray
    steps: np.ndarray
    spec_steps: np.ndarray
    drafts: np.ndarray

    @classmethod
    def of_rows(cls, table: pa.Table) -> "Spans":
        """Those of a part's rows."""
        ends = table["finished_at"].cast(pa.int64()).to_numpy() / 1e6
        counted = ("generated_tokens", "input_tokens", "steps", "spec_steps", "draft_tokens")
        counts = (numbers(table, f"num_{name}") for name in counted)
        return cls(ends - numbers(table, "time_taken"), ends, *counts)

    @classmethod
    def joined(cls, parts: Iterable["Spans"]) -> "Spans":
        """All spans of several."""
        every = [cls(*(np.zeros(0) for _ in fields(cls))), *parts]
        return cls(*(np.concatenate([getattr(p, f.name) for p in every]) for f in fields(cls)))

    def edges(self, num_bins: int) -> np.ndarray:
        """Times [num_bins + 1] that divide the whole evenly."""
        first, last = float(self.starts.min()), float(self.ends.max())
        return np.linspace(first, max(last, first + 1e-3), num_bins + 1)

    @property
    def seconds(self) -> float:
        """The time in which something was generated; pauses are none of it."""
        if not len(self.starts):
            return 0.0
        order = np.argsort(self.starts)
        starts, ends = self.starts[order], np.maximum.accumulate(self.ends[order])
        pauses = np.maximum(starts[1:] - ends[:-1], 0).sum()
        return float(ends[-1] - starts[0] - pauses)

    @property
    def rows(self) -> np.ndarray:
        """The weight of each sample that makes `over_time` count the samples under way."""
        result: np.ndarray = self.ends - self.starts
        return result

    def over_time(self, weights: np.ndarray, edges: np.ndarray) -> np.ndarray:
        """Spread each sample's weight evenly over its time: the weight per second between edges."""
        rates = weights / np.maximum(self.ends - self.starts, 1e-6)
        begun, ended = (_ramps(at, rates, edges) for at in (self.starts, self.ends))
        rate: np.ndarray = np.maximum(np.diff(begun - ended), 0) / np.diff(edges)
        return rate


def _ramps(at: np.ndarray, rates: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """At each edge, the sum of rate * (edge - at) over all that begins before it."""
    order = np.argsort(at)
    at, rates = at[order] - edges[0], rates[order]
    before = np.searchsorted(at, edges - edges[0])
    rate, moment = (np.concatenate([[0.0], part.cumsum()])[before] for part in (rates, rates * at))
    result: np.ndarray = rate * (edges - edges[0]) - moment
    return result


@dataclass(frozen=True)
class Saved:
    """What drafts saved, estimated by step times.

    Attributes:
        seconds: of the passes that gave the tokens.
        plain_seconds: that they had taken with a token a row and pass.
        num_tokens: that they gave.
        busy_seconds: that were spent in truth, on prompts and all else as well.
    """

    seconds: float = 0.0
    plain_seconds: float = 0.0
    num_tokens: int = 0
    busy_seconds: float = 0.0

    def __add__(self, other: "Saved") -> "Saved":
        return Saved(
            self.seconds + other.seconds,
            self.plain_seconds + other.plain_seconds,
            self.num_tokens + other.num_tokens,
            self.busy_seconds + other.busy_seconds,
        )

    @property
    def is_likely(self) -> bool:
        """Whether the passes make up enough of the time for the step times to be those of this run: not
        where the machine was busy with something else, or where prompts and long rows took most of it.
        """
        return self.seconds >= _LEAST_SHARE * self.busy_seconds

    @property
    def share(self) -> float:
        """Of the time without drafts; below zero where they cost more than they gave."""
        return 1 - self.seconds / self.plain_seconds


@dataclass(frozen=True)
class WorkerSpans:
    """What one worker generated; how many rows it takes at once, and its step times, where known."""

    spans: Spans
    max_num_seqs: int | None
    times: StepTimes | None

    @property
    def saved(self) -> Saved | None:
        """What drafts saved here; None if there were none, or step times were not measured.

        A sample's first pass, which reads its prompt and gives the first token, is left out. The others,
        and what was drafted and generated in them, are spread evenly over the sample's time. Between
        any two beginnings or ends as many samples are under way, B: with s steps there, there were s / B
        passes; for t tokens without drafts there had been t / B, of B tokens each. Which rows of a pass
        had a draft is not known: any may have had, alike and apart from the others.
        """
        spans, times = self.spans, self.times
        if times is None or not spans.drafts.sum():
            return None
        edges = np.unique(np.concatenate([spans.starts, spans.ends]))
        if len(edges) > _MOST_INTERVALS:
            edges = edges[np.linspace(0, len(edges) - 1, _MOST_INTERVALS).astype(int)]
        after_first = (np.maximum(counts - 1, 0) for counts in (spans.steps, spans.tokens))
        steps, tokens, spec_steps, drafts = (
            spans.over_time(counts, edges) * np.diff(edges)
            for counts in (*after_first, spans.spec_steps, spans.drafts)
        )
        rows = spans.over_time(spans.rows, edges)
        busy = (rows > 0.5) & (steps > 0)
        steps, tokens, spec_steps, drafts, rows = (
            of[busy] for of in (steps, tokens, spec_steps, drafts, rows)
        )
        length = drafts / np.maximum(spec_steps, 1e-9)
        passes = _mean_times(times, np.rint(rows).astype(int), spec_steps / steps, length)
        as_it_was = steps / rows * passes
        plain = tokens / rows * times(np.rint(rows))
        of_all = (float(each.sum()) for each in (as_it_was, plain, tokens))
        seconds, plain_seconds, num_tokens = of_all
        return Saved(seconds, plain_seconds, round(num_tokens), spans.seconds)


def _mean_times(
    times: StepTimes, rows: np.ndarray, chances: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """The mean time of passes of so many rows [n], each of which has a draft of a length [n] by a chance
    [n]: a pass of k drafts, by how likely k of the rows have one.
    """
    most = int(rows.max(initial=0))
    log_factorial = np.concatenate([[0.0], np.log(np.arange(1, most + 1)).cumsum()])
    yes, no = (np.log(np.clip(chance, 1e-12, 1)) for chance in (chances, 1 - chances))
    result = np.zeros(len(rows))
    for k in range(most + 1):
        left = rows - k
        log_ways = log_factorial[rows] - log_factorial[k] - log_factorial[np.maximum(left, 0)]
        likely = np.where(left >= 0, np.exp(log_ways + k * yes + left * no), 0.0)
        result += likely * times(rows + k * lengths)
    return result
