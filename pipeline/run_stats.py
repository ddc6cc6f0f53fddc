"""What a run's parts say, added up: one part at a time, from the parts alone."""

import json
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import DamagedPartError
from pipeline.parts import list_parts, part_uri, read_part
from pipeline.schema import OUTPUT_SCHEMA
from pipeline.spans import Saved, Spans, WorkerSpans
from pipeline.sums import Kind, sum_kinds, sum_rows
from workers.step_times import StepTimes

NUM_SLOWEST, NUM_ANSWERS = 10, 5
MOST_KINDS = (
    30  # A column with more different values than this tells rows apart, not kinds of them.
)


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
        footers: what the parts say of their making, each once, without what is of one worker.
        devices: what ran it.
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
    devices: set[str] = field(default_factory=set)
    _kinds: dict[str, dict[str, Kind]] = field(default_factory=dict)
    _spans: dict[str, list[Spans]] = field(default_factory=lambda: defaultdict(list))
    _workers: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def kinds(self) -> dict[str, dict[str, Kind]]:
        """By carried column, samples by its value; of columns with a few different ones."""
        return {name: kinds for name, kinds in self._kinds.items() if 1 < len(kinds) <= MOST_KINDS}

    @property
    def spans(self) -> Spans:
        """Of all samples that were generated."""
        return Spans.joined(part for parts in self._spans.values() for part in parts)

    @property
    def workers(self) -> dict[str, WorkerSpans]:
        """By worker; by device where a part does not name its worker."""
        return {
            name: WorkerSpans(Spans.joined(parts), **self._workers.get(name, _NOTHING_KNOWN))
            for name, parts in sorted(self._spans.items())
        }

    @property
    def batch_fill(self) -> float | None:
        """Rows under way over those that the workers take, while any is; None if that is not known."""
        known = [(w.spans, w.max_num_seqs) for w in self.workers.values() if w.max_num_seqs]
        places = sum(spans.seconds * num_rows for spans, num_rows in known)
        return sum(float(spans.rows.sum()) for spans, _ in known) / places if places else None

    @property
    def saved(self) -> Saved | None:
        """What drafts saved; None if nobody drafted, or measured step times."""
        known = [saved for w in self.workers.values() if (saved := w.saved) is not None]
        total = sum(known, Saved())
        return total if total.plain_seconds else None

    def add(self, table: pa.Table) -> None:
        """Take in a part."""
        footer = json.loads((table.schema.metadata or {}).get(b"quasar", b"{}"))
        footer.pop("shard", None)
        worker = self._take_worker(footer)
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
        self.total += sum_rows(table)
        for name in table.column_names[len(OUTPUT_SCHEMA) :]:
            self._add_kinds(table, name)
        answered = own.filter(own["error"].is_null())
        self._add_spans(answered, worker)
        self._add_examples(answered)

    def _take_worker(self, footer: dict[str, Any]) -> str | None:
        """Take what a footer says of its worker out of it; the worker's name."""
        name, max_num_seqs, times = (
            footer.pop(key, None) for key in ("worker", "max_num_seqs", "step_times")
        )
        if name is not None:
            measured = times and StepTimes(*zip(*times, strict=True))
            self._workers[name] = {"max_num_seqs": max_num_seqs, "times": measured}
        return str(name) if name is not None else None

    def _add_spans(self, answered: pa.Table, worker: str | None) -> None:
        """Rows that an earlier try answered are by a worker that the footer does not name."""
        if not len(answered):
            return
        devices = answered["device"].unique().to_pylist()
        self.devices.update(devices)
        last = pc.equal(answered["attempt"], pc.max(answered["attempt"]))
        if worker is not None:
            self._spans[worker].append(Spans.of_rows(answered.filter(last)))
            answered = answered.filter(pc.invert(last))
        for device in devices:
            mine = answered.filter(pc.equal(answered["device"], device))
            if len(mine):
                self._spans[device].append(Spans.of_rows(mine))

    def _add_kinds(self, table: pa.Table, name: str) -> None:
        column, known = table[name], self._kinds.setdefault(name, {})
        kind = column.type
        if pa.types.is_nested(kind) or pa.types.is_floating(kind) or len(known) > MOST_KINDS:
            return
        encoded = column.cast(pa.string()).fill_null("").combine_chunks().dictionary_encode()
        values = encoded.dictionary.to_pylist()
        sums = sum_kinds(table, encoded.indices.to_numpy(), len(values))
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


_NOTHING_KNOWN: dict[str, Any] = {"max_num_seqs": None, "times": None}


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
