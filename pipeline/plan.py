"""The plan: every input row in a prompt shard, written once, read by every later phase.

A prompt shard is a small Parquet file of fixed rows under OUT/plan. Rows that cannot run are in it
with their reason. `plan.json` is written last; where it is, the plan is complete.
"""

import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.admission import Admission, AdmittedRow
from pipeline.errors import InputError
from pipeline.schema import plan_table, schema_from_json, schema_to_json, unify_carried
from pipeline.sources import column_types, locate, read_rows

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
    limit: int | None

    def to_json(self) -> str:
        """The group as text."""
        return json.dumps([self.sources, self.limit])

    @classmethod
    def from_json(cls, text: str) -> "SourceGroup":
        """The group `to_json` wrote."""
        sources, limit = json.loads(text)
        return cls(tuple((index, uri, name) for index, uri, name in sources), limit)


@dataclass(frozen=True)
class Plan:
    """All shards of a run, and the schema of the columns they carry."""

    shards: tuple[Shard, ...]
    carried: pa.Schema

    @property
    def num_rows(self) -> int:
        """Rows of the input."""
        return sum(shard.num_rows for shard in self.shards)

    @property
    def max_total_tokens(self) -> int:
        """The longest prompt plus answer: what a cache row must hold."""
        return max((shard.max_total_tokens for shard in self.shards), default=0)

    def save(self, output: str) -> None:
        """Write plan.json, which makes the plan complete."""
        content = {
            "shards": [asdict(shard) for shard in self.shards],
            "carried": schema_to_json(self.carried),
        }
        storage.write_atomic(_manifest(output), json.dumps(content, indent=1).encode())

    @classmethod
    def load(cls, output: str) -> "Plan | None":
        """The plan of an output folder, or None if there is no complete one."""
        content = storage.read_bytes(_manifest(output))
        if content is None:
            return None
        try:
            raw = json.loads(content)
            shards = tuple(Shard(**shard) for shard in raw["shards"])
            return cls(shards, schema_from_json(raw["carried"]))
        except (ValueError, KeyError, TypeError, pa.ArrowException) as error:
            raise InputError(f"{_manifest(output)}: damaged ({error})") from error


def group_sources(uris: Sequence[str], limit: int | None) -> list[SourceGroup]:
    """Sources that are planned side by side, or all in one group where a limit counts across them."""
    bases = [uri.rsplit("/", 1)[-1] for uri in uris]
    names = bases if len(set(bases)) == len(bases) else list(uris)
    sources = tuple(zip(range(len(uris)), uris, names, strict=True))
    if limit is not None:
        return [SourceGroup(sources, limit)]
    return [SourceGroup((source,), None) for source in sources]


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


def assemble(written: Iterable[tuple[Shard, pa.Schema]], output: str) -> Plan:
    """The plan of all written shards, checked: there are rows, and no id occurs twice."""
    ordered = sorted(written, key=lambda item: item[0].name)
    carried = unify_carried(
        (schema, partial(_read_column, output, shard.name)) for shard, schema in ordered
    )
    plan = Plan(tuple(shard for shard, _ in ordered), carried)
    if plan.num_rows == 0:
        raise InputError("the input holds no rows")
    _check_ids(plan, output)
    return plan


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


def _read_column(output: str, shard: str, name: str) -> pa.ChunkedArray:
    return read_shard(output, shard, [name]).column(name)


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


def _check_ids(plan: Plan, output: str) -> None:
    """Refuse ids that occur twice: (id, sample_idx) is the key of the output."""
    hashes = Counter[int]()
    for shard in plan.shards:
        hashes.update(map(hash, _ids(output, shard)))
    suspects = {key for key, count in hashes.items() if count > 1}
    if not suspects:
        return
    seen: dict[str, str] = {}
    for shard in plan.shards:
        table = read_shard(output, shard.name, ["id", "source", "row"])
        for row in table.to_pylist():
            if hash(row["id"]) not in suspects:
                continue
            where = locate(row["source"], row["row"])
            if row["id"] in seen:
                raise InputError(f"{where}: the id {row['id']!r} is also that of {seen[row['id']]}")
            seen[row["id"]] = where


def _ids(output: str, shard: Shard) -> list[str]:
    ids: list[str] = read_shard(output, shard.name, ["id"]).column("id").to_pylist()
    return ids


def _manifest(output: str) -> str:
    return storage.join(output, "plan", "plan.json")


def _shard_file(output: str, name: str) -> str:
    return storage.join(output, "plan", f"shard-{name}.parquet")
