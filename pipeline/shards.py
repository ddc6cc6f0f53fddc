"""Prompt shards: input rows, admitted, in small Parquet files of fixed rows."""

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import failpoints, storage
from pipeline.admission import Admission, AdmittedRow
from pipeline.errors import DamagedOutputError, InputError
from pipeline.schema import plan_table, schema_to_json
from pipeline.sources import column_types, read_rows

_FIRST_SHARD_ROWS = 8
_REMEDY = "`verify --repair` sets it aside, and `generate` makes it again from its source"
_WRITTEN = ("shard", "schema", "bad_input", "bad_storage")


@dataclass(frozen=True)
class Shard:
    """A unit of work and of commitment: fixed rows, one output part.

    `max_total_tokens` is the longest prompt plus answer among its rows; `sha256` is of its file,
    `content` of what was made of its source, before it was said which rows share answers.
    """

    name: str
    num_rows: int
    num_refused: int
    num_input_tokens: int
    max_total_tokens: int
    num_bytes: int
    sha256: str
    content: str

    @property
    def source(self) -> int:
        """The index of the source its rows are from."""
        return int(self.name.partition("-")[0])


@dataclass(frozen=True)
class SourceGroup:
    """Sources planned together, in order: (index, URI, name for ids).

    `limit` is how many rows are read of them; `only`, if not empty, which shards are written (again), and
    the `content` that each must have.
    """

    sources: tuple[tuple[int, str, str], ...]
    limit: int | None = None
    only: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The group as text."""
        return json.dumps([self.sources, self.limit, self.only])

    @classmethod
    def from_json(cls, text: str) -> "SourceGroup":
        """The group `to_json` wrote."""
        sources, limit, only = json.loads(text)
        return cls(tuple((index, uri, name) for index, uri, name in sources), limit, only)


def write_shards(
    group: SourceGroup, admission: Admission, output: str, rows_per_shard: int
) -> Iterator[tuple[Shard, pa.Schema]]:
    """Admit a group's rows and write its prompt shards; yields each with its schema.

    Raises:
        InputError: a source is unreadable, or gives something else than it did when it was planned.
    """
    left = group.limit
    for index, uri, name in group.sources:
        rows = (admission.admit(raw, name) for raw in islice(read_rows(uri), left))
        types = column_types(uri)
        for number, chunk in enumerate(_chunks(rows, rows_per_shard)):
            left = None if left is None else left - len(chunk)
            shard = f"{index:05d}-{number:05d}"
            if group.only and shard not in group.only:
                continue
            table = plan_table(chunk, types, uri)
            content = to_parquet(table)
            described = _describe(shard, chunk, content)
            if group.only and described.content != group.only[shard]:
                raise InputError(
                    f"{uri}: has changed since it was planned, and the prompt shard {shard} that was "
                    "made of it is lost; put the file back as it was, or choose another output folder"
                )
            storage.write_atomic(shard_uri(output, shard), content)
            failpoints.reach("plan-shard", shard)
            yield described, table.schema


def rewrite_shard(output: str, shard: Shard, columns: dict[str, pa.Array]) -> Shard:
    """Write a prompt shard again with other values in these columns."""
    table = read_shard(output, shard.name)
    for name, values in columns.items():
        table = table.set_column(table.column_names.index(name), table.schema.field(name), values)
    content = to_parquet(table)
    storage.write_atomic(shard_uri(output, shard.name), content)
    return replace(shard, num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def write_groups(
    batch: dict[str, np.ndarray], admission: Admission, output: str, rows_per_shard: int
) -> dict[str, list[str]]:
    """Write the shards of source groups: a batch function of Ray Data.

    Returns:
        Columns `shard` and `schema` (JSON), and errors as values, as Ray would bury an exception: of an
        unreadable source in `bad_input`, of storage in `bad_storage`.
    """
    columns: dict[str, list[str]] = {name: [] for name in _WRITTEN}
    for group in map(SourceGroup.from_json, batch["group"]):
        try:
            for shard, schema in write_shards(group, admission, output, rows_per_shard):
                _append(columns, shard=json.dumps(asdict(shard)), schema=schema_to_json(schema))
        except InputError as error:
            _append(columns, bad_input=str(error))
        except OSError as error:
            _append(columns, bad_storage=str(error))
    return columns


def _append(columns: dict[str, list[str]], **given: str) -> None:
    for name, values in columns.items():
        values.append(given.get(name, ""))


def read_shard(output: str, name: str, columns: list[str] | None = None) -> pa.Table:
    """A prompt shard's rows, in all columns or in those named; raises DamagedOutputError."""
    uri = shard_uri(output, name)
    content = storage.read_bytes(uri)
    if content is None:
        raise DamagedOutputError(f"{uri}: is missing, though the plan names it; {_REMEDY}")
    try:
        return pq.read_table(io.BytesIO(content), columns=columns)
    except (OSError, pa.ArrowException) as error:
        raise DamagedOutputError(f"{uri}: is damaged; {_REMEDY}") from error


def check_shard(output: str, shard: Shard) -> str:
    """What is wrong with a prompt shard's file; empty if nothing is."""
    uri = shard_uri(output, shard.name)
    content = storage.read_bytes(uri)
    if content is None:
        return f"{uri}: is missing"
    whole = hashlib.sha256(content).hexdigest() == shard.sha256
    return "" if whole else f"{uri}: is damaged (its bytes are not those that were planned)"


def missing_shards(output: str, shards: Iterable[Shard]) -> list[Shard]:
    """Those whose file is not there, or has another size than it had."""
    there = storage.list_files(storage.join(output, "plan"))
    sizes = {uri.rpartition("/")[2]: num_bytes for uri, num_bytes in there.items()}
    return [s for s in shards if sizes.get(f"shard-{s.name}.parquet") != s.num_bytes]


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


def _describe(name: str, rows: Sequence[AdmittedRow], content: bytes) -> Shard:
    digest = hashlib.sha256(content).hexdigest()
    return Shard(
        name=name,
        num_rows=len(rows),
        num_refused=sum(row.error is not None for row in rows),
        num_input_tokens=sum(len(row.prompt_token_ids or ()) for row in rows),
        max_total_tokens=max(row.max_total_tokens for row in rows),
        num_bytes=len(content),
        sha256=digest,
        content=digest,
    )


def shard_uri(output: str, name: str) -> str:
    """Where a prompt shard lies."""
    return storage.join(output, "plan", f"shard-{name}.parquet")
