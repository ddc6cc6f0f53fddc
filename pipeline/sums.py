"""Sums over rows of parts, all at once or by kind."""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from workers.stats import AcceptanceStats


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


def sum_rows(table: pa.Table) -> Kind:
    """The sums of all rows."""
    (total,) = sum_kinds(table, np.zeros(len(table), np.int64), 1)
    return total


def sum_kinds(table: pa.Table, kind_of_row: np.ndarray, num_kinds: int) -> list[Kind]:
    """Sums by kind: `kind_of_row` [n] says which each row is of.

    Answers of other rows are counted, and no more.
    """
    is_own = table["answer_of"].is_null().to_numpy()

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(kind_of_row, values, num_kinds)

    own = {
        name: total(numbers(table, name) * is_own)
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


def numbers(table: pa.Table, name: str) -> np.ndarray:
    """A column, nulls as zeros."""
    result: np.ndarray = table[name].fill_null(0).to_numpy()
    return result
