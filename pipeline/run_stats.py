"""What a run's parts say, added up: one part at a time, from the parts alone."""

import json
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import DamagedPartError
from pipeline.parts import list_parts, part_uri, read_part
from pipeline.schema import OUTPUT_SCHEMA
from workers.stats import AcceptanceStats

NUM_SLOWEST, NUM_ANSWERS = 10, 5
MOST_KINDS = (
    30  # A column with more different values than this tells rows apart, not kinds of them.
)


@dataclass(frozen=True)
class Kind:
    """Samples that have one value in some column; `seconds` adds up what each of them took."""

    num_samples: int = 0
    num_errors: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)

    def __add__(self, other: "Kind") -> "Kind":
        return Kind(
            self.num_samples + other.num_samples,
            self.num_errors + other.num_errors,
            self.num_tokens + other.num_tokens,
            self.seconds + other.seconds,
            self.stats + other.stats,
        )


_SPAN_ARRAYS = ("starts", "ends", "tokens", "prompt_tokens", "devices")


@dataclass(frozen=True)
class Spans:
    """When which samples were generated: arrays [n], times in seconds since the epoch."""

    starts: np.ndarray
    ends: np.ndarray
    tokens: np.ndarray
    prompt_tokens: np.ndarray
    devices: np.ndarray

    def where(self, chosen: np.ndarray) -> "Spans":
        """Those that a mask [n] chooses."""
        return Spans(*(getattr(self, name)[chosen] for name in _SPAN_ARRAYS))

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


@dataclass
class RunStats:
    """Sums over the samples of a run. Those that are the answer of another row are counted, no more.

    Attributes:
        num_rows: of the input.
        num_shared: samples that are the answer of another row.
        total: all samples.
        finish_reasons: how many samples ended how.
        errors: how many samples failed, by kind, and `error_examples` the first reason of each.
        slowest: the samples that took longest, as rows.
        answers: a few answers, as rows.
        footers: what the parts say of their making, each once.
    """

    num_rows: int = 0
    num_shared: int = 0
    total: Kind = field(default_factory=Kind)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    error_examples: dict[str, str] = field(default_factory=dict)
    slowest: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    footers: list[dict[str, Any]] = field(default_factory=list)
    _kinds: dict[str, dict[str, Kind]] = field(default_factory=dict)
    _spans: list[Spans] = field(default_factory=list)

    @property
    def kinds(self) -> dict[str, dict[str, Kind]]:
        """By carried column, samples by its value; of columns with a few different ones."""
        return {name: kinds for name, kinds in self._kinds.items() if 1 < len(kinds) <= MOST_KINDS}

    @property
    def spans(self) -> Spans:
        """Of all samples that were generated."""
        return Spans(
            *(
                np.concatenate([getattr(part, name) for part in self._spans])
                for name in _SPAN_ARRAYS
            )
        )

    def add(self, table: pa.Table) -> None:
        """Take in a part."""
        footer = json.loads((table.schema.metadata or {}).get(b"quasar", b"{}"))
        footer.pop("shard", None)
        if footer not in self.footers:
            self.footers.append(footer)
        own = table.filter(table["answer_of"].is_null())
        self.num_rows += len(pc.unique(table["id"]))
        self.num_shared += len(table) - len(own)
        self.finish_reasons.update(table["finish_reason"].to_pylist())
        failed = table.filter(table["error"].is_valid()).select(["error_type", "error"]).to_pylist()
        for row in failed:
            self.errors[row["error_type"]] += 1
            self.error_examples.setdefault(row["error_type"], row["error"])
        (total,) = _sums(table, np.zeros(len(table), np.int64), 1)
        self.total += total
        for name in table.column_names[len(OUTPUT_SCHEMA) :]:
            self._add_kinds(table, name)
        answered = own.filter(own["error"].is_null())
        self._spans.append(_spans(answered))
        self._add_examples(answered)

    def _add_kinds(self, table: pa.Table, name: str) -> None:
        column, known = table[name], self._kinds.setdefault(name, {})
        kind = column.type
        if pa.types.is_nested(kind) or pa.types.is_floating(kind) or len(known) > MOST_KINDS:
            return
        encoded = column.cast(pa.string()).fill_null("").combine_chunks().dictionary_encode()
        values = encoded.dictionary.to_pylist()
        sums = _sums(table, encoded.indices.to_numpy(), len(values))
        for value, added in zip(values, sums, strict=True):
            if value in known or len(known) <= MOST_KINDS:
                known[value] = known.get(value, Kind()) + added

    def _add_examples(self, answered: pa.Table) -> None:
        shown = answered.select([name for name in _SHOWN if name in answered.column_names])
        slow = pc.select_k_unstable(shown, k=NUM_SLOWEST, sort_keys=[("time_taken", "descending")])
        longest = [*self.slowest, *shown.take(slow).drop_columns(list(_TEXTS)).to_pylist()]
        self.slowest = sorted(longest, key=lambda row: -row["time_taken"])[:NUM_SLOWEST]
        lots = np.array([_lot(row_id) for row_id in shown["id"].to_pylist()], np.int64)
        drawn = shown.take(pa.array(lots.argsort(kind="stable")[:NUM_ANSWERS]))
        answers = [*self.answers, *drawn.to_pylist()]
        self.answers = sorted(answers, key=lambda row: _lot(row["id"]))[:NUM_ANSWERS]


def _lot(row_id: str) -> int:
    """Draws rows by their ids: always the same ones, from all over the run."""
    return zlib.crc32(row_id.encode())


_TEXTS = ("prompt", "messages", "generated_text")
_SHOWN = (
    *("id", "sample_idx", *_TEXTS, "num_input_tokens", "num_generated_tokens", "finish_reason"),
    *("time_taken", "device", "num_steps", "num_draft_tokens", "num_accepted_draft_tokens"),
    *("mean_acceptance_length", "draft_acceptance_rate"),
)


def read_stats(output: str) -> RunStats:
    """Add up all parts of an output folder; raises DamagedPartError."""
    stats = RunStats()
    for shard in sorted(list_parts(output)):
        table, _ = read_part(output, shard)
        if missing := [name for name in OUTPUT_SCHEMA.names if name not in table.column_names]:
            uri = part_uri(output, shard)
            raise DamagedPartError(f"{uri}: is damaged (it has no column {missing[0]!r})")
        stats.add(table)
    return stats


def _spans(table: pa.Table) -> Spans:
    ends = table["finished_at"].cast(pa.int64()).to_numpy() / 1e6
    tokens, prompt_tokens = (
        _numbers(table, f"num_{name}_tokens") for name in ("generated", "input")
    )
    devices = table["device"].to_numpy()
    return Spans(ends - _numbers(table, "time_taken"), ends, tokens, prompt_tokens, devices)


def _sums(table: pa.Table, kind_of_row: np.ndarray, num_kinds: int) -> list[Kind]:
    """Sums by kind: `kind_of_row` [n] says which each row is of."""
    is_own = table["answer_of"].is_null().to_numpy()

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(kind_of_row, values, num_kinds)

    own = {
        name: total(_numbers(table, name) * is_own)
        for name in ("num_generated_tokens", "time_taken", "num_steps", "num_draft_tokens")
    }
    samples, errors = total(np.ones(len(table))), total(table["error"].is_valid().to_numpy())
    histograms = table["acceptance_histogram"].combine_chunks()
    row_of_value = pc.list_parent_indices(histograms).to_numpy()
    counts = pc.list_flatten(histograms).to_numpy() * is_own[row_of_value]
    accepted = np.arange(len(counts)) - np.searchsorted(row_of_value, row_of_value)
    by_kind = np.zeros((num_kinds, int(accepted.max(initial=-1)) + 1), np.int64)
    np.add.at(by_kind, (kind_of_row[row_of_value], accepted), counts)
    return [
        Kind(
            int(samples[i]),
            int(errors[i]),
            int(own["num_generated_tokens"][i]),
            float(own["time_taken"][i]),
            AcceptanceStats(
                int(own["num_steps"][i]),
                int(own["num_draft_tokens"][i]),
                tuple(int(count) for count in by_kind[i]),
            ),
        )
        for i in range(num_kinds)
    ]


def _numbers(table: pa.Table, name: str) -> np.ndarray:
    """A column, nulls as zeros."""
    result: np.ndarray = table[name].fill_null(0).to_numpy()
    return result
