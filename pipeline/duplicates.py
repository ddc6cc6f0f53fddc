"""Rows with one prompt and the same parameters, which share their answers if a run wants it so.

The first such row of the plan is generated. The others say where it is, and take its answers from its
part; where that is not there yet, a worker may generate them itself: the seed is the same.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import DamagedPartError
from pipeline.parts import read_part
from pipeline.schema import OUTPUT_SCHEMA
from pipeline.shards import Shard, read_shard, rewrite_shard

_NO_DIGEST = bytes(16)


@dataclass
class Duplicates:
    """Which rows of a shard share the answers of which; rows by their index in it.

    Attributes:
        firsts: [rows] the shard's first row with the same prompt and parameters: itself, mostly.
        elsewhere: by shard, rows of other shards that come first: from their index there to that here.
    """

    firsts: list[int]
    elsewhere: dict[str, dict[int, int]]

    @classmethod
    def of_rows(cls, rows: Sequence[dict[str, Any]]) -> "Duplicates":
        """Of a shard's rows, as its plan has them."""
        known: dict[bytes | int, int] = {}
        firsts = [known.setdefault(row["prompt_digest"] or i, i) for i, row in enumerate(rows)]
        elsewhere: defaultdict[str, dict[int, int]] = defaultdict(dict)
        for index in set(firsts):
            if rows[index]["first_shard"] is not None:
                elsewhere[rows[index]["first_shard"]][rows[index]["first_row"]] = index
        return cls(firsts, dict(elsewhere))

    def generated(self, rows: Iterable[int]) -> list[int]:
        """Those of the rows that no other is known for that they could have their answers from."""
        pointed = {index for wanted in self.elsewhere.values() for index in wanted.values()}
        return [row for row in rows if self.firsts[row] == row and row not in pointed]


def find_answers(
    output: str, shard: str, rows: Collection[int], *, failed: bool
) -> dict[int, list[dict[str, Any]]]:
    """Our columns for the samples of a shard's rows, by the rows' index, as far as they are there.

    Those of a row that failed are there only if they are asked for.
    """
    try:
        table, _ = read_part(output, shard)
    except DamagedPartError:
        return {}
    ids = dict.fromkeys(table["id"].to_pylist())
    wanted = {row_id: row for row, row_id in enumerate(ids) if row in rows}
    chosen = pc.is_in(table["id"], pa.array(wanted, pa.string()))
    found = defaultdict(list)
    for answer in table.select(OUTPUT_SCHEMA.names).filter(chosen).to_pylist():
        found[wanted[answer["id"]]].append(answer)
    return {
        row: answers
        for row, answers in found.items()
        if failed or all(answer["error"] is None for answer in answers)
    }


def point_to_firsts(
    shards: Sequence[Shard], output: str, added: Collection[str]
) -> tuple[Shard, ...]:
    """Write into the added shards where the first row with a row's digest is, if it is another one.

    Args:
        shards: all of the plan, in order.
        added: names of those to be written.

    Returns:
        All shards; those that hold a row that is not a first one are written anew.
    """
    ends = np.cumsum([shard.num_rows for shard in shards])
    digests = np.concatenate([_digests(output, shard) for shard in shards])
    _, first_of_kind, kind = np.unique(digests, return_index=True, return_inverse=True)
    firsts = first_of_kind[kind]
    firsts[digests == _NO_DIGEST] = np.flatnonzero(digests == _NO_DIGEST)
    pointed = []
    for shard, end in zip(shards, ends, strict=True):
        start = end - shard.num_rows
        mine = firsts[start:end]
        is_other = mine != np.arange(start, end)
        if shard.name in added and is_other.any():
            holders = np.searchsorted(ends, mine, side="right")
            names = [shards[i].name for i in holders]
            rows = mine - (ends[holders] - [shards[i].num_rows for i in holders])
            shard = rewrite_shard(
                output,
                shard,
                {
                    "first_shard": pa.array(names, pa.string(), mask=~is_other),
                    "first_row": pa.array(rows, pa.int32(), mask=~is_other),
                },
            )
        pointed.append(shard)
    return tuple(pointed)


def _digests(output: str, shard: Shard) -> np.ndarray:
    """[rows] 16 bytes each; zeros for rows that cannot run."""
    column = read_shard(output, shard.name, ["prompt_digest"]).column("prompt_digest")
    filled = column.combine_chunks().fill_null(_NO_DIGEST)
    return np.array(filled.to_pylist(), "S16")
