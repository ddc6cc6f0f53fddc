"""Prompt shards: input rows, admitted, in small Parquet files of fixed rows."""

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.admission import Admission, AdmittedRow
from pipeline.errors import InputError
from pipeline.schema import plan_table, schema_to_json
from pipeline.sources import column_types, read_rows

_FIRST_SHARD_ROWS = 8


@dataclass(frozen=True)
class Shard:
    """A unit of work and of commitment: fixed rows, one output part.

    `max_total_tokens` is the longest prompt plus answer among its rows.
    """

    name: str
    num_rows: int
    num_refused: int
    num_input_tokens: int
    max_total_tokens: int


@dataclass(frozen=True)
class SourceGroup:
    """Sources planned together, in order: (index, URI, name for ids)."""

    sources: tuple[tuple[int, str, str], ...]
    limit: int | None = None

    def to_json(self) -> str:
        """The group as text."""
        return json.dumps([self.sources, self.limit])

    @classmethod
    def from_json(cls, text: str) -> "SourceGroup":
        """The group `to_json` wrote."""
        sources, limit = json.loads(text)
        return cls(tuple((index, uri, name) for index, uri, name in sources), limit)


def write_shards(
    group: SourceGroup, admission: Admission, output: str, rows_per_shard: int
) -> Iterator[tuple[Shard, pa.Schema]]:
    """Admit a group's rows and write its prompt shards; yields each with its schema."""
    left = group.limit
    for index, uri, name in group.sources:
        rows = (admission.admit(raw, name) for raw in islice(read_rows(uri), left))
        types = column_types(uri)
        for number, chunk in enumerate(_chunks(rows, rows_per_shard)):
            table = plan_table(chunk, types)
            shard = _describe(f"{index:05d}-{number:05d}", chunk)
            storage.write_atomic(_shard_file(output, shard.name), to_parquet(table))
            left = None if left is None else left - len(chunk)
            yield shard, table.schema


def write_groups(
    batch: dict[str, np.ndarray], admission: Admission, output: str, rows_per_shard: int
) -> dict[str, list[str]]:
    """Write the shards of source groups: a batch function of Ray Data.

    Returns:
        Columns `shard` and `schema` (JSON), and `error`: an unreadable source is a value, as Ray would
        bury its exception.
    """
    columns: dict[str, list[str]] = {"shard": [], "schema": [], "error": []}
    for group in map(SourceGroup.from_json, batch["group"]):
        try:
            for shard, schema in write_shards(group, admission, output, rows_per_shard):
                columns["shard"].append(json.dumps(asdict(shard)))
                columns["schema"].append(schema_to_json(schema))
                columns["error"].append("")
        except InputError as error:
            for name, value in (("shard", ""), ("schema", ""), ("error", str(error))):
                columns[name].append(value)
    return columns


def read_shard(output: str, name: str, columns: list[str] | None = None) -> pa.Table:
    """A prompt shard's rows, in all columns or in those named."""
    content = storage.read_bytes(_shard_file(output, name))
    if content is None:
        raise InputError(f"{_shard_file(output, name)}: missing, though the plan names it")
    return pq.read_table(io.BytesIO(content), columns=columns)


def to_parquet(table: pa.Table) -> bytes:
    """A table as the bytes of a Parquet file."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def _chunks(rows: Iterator[AdmittedRow], rows_per_shard: int) -> Iterator[list[AdmittedRow]]:
    size = min(_FIRST_SHARD_ROWS, rows_per_shard)
    while chunk := list(islice(rows, size)):
        yield chunk
        size = min(size * 2, rows_per_shard)


def _describe(name: str, rows: Sequence[AdmittedRow]) -> Shard:
    return Shard(
        name=name,
        num_rows=len(rows),
        num_refused=sum(row.error is not None for row in rows),
        num_input_tokens=sum(len(row.prompt_token_ids or ()) for row in rows),
        max_total_tokens=max(row.max_total_tokens for row in rows),
    )


def _shard_file(output: str, name: str) -> str:
    return storage.join(output, "plan", f"shard-{name}.parquet")
