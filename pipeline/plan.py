"""The plan: every input row in a prompt shard, written once, read by every later phase.

A prompt shard is a small Parquet file of fixed rows under OUT/plan. Rows that cannot run are in it
with their reason. `plan.json` is written last; where it is, the plan is complete.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import pyarrow as pa

from pipeline import failpoints, storage
from pipeline.errors import DamagedOutputError, InputError, TooManyErrorsError
from pipeline.schema import CARRIED, schema_from_json, schema_to_json, unify_carried
from pipeline.shards import Shard, SourceGroup, read_shard
from pipeline.sources import locate, source_stamp


@dataclass(frozen=True)
class Plan:
    """All shards of a run, the schema of the columns they carry, and where they came from.

    Attributes:
        shards: sources in the order they were added, each in its own order.
        carried: names in the plan, and their types.
        sources: URI and name for ids of every source; a source's index begins its shards' names.
        stamps: size and time of change of each source when it was planned, where its storage tells.
        origin: what beside the configuration the tokens depend on: digests, by what they are of.
    """

    shards: tuple[Shard, ...]
    carried: pa.Schema
    sources: tuple[tuple[str, str], ...]
    origin: dict[str, str]
    stamps: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows of the input."""
        return sum(shard.num_rows for shard in self.shards)

    @property
    def max_total_tokens(self) -> int:
        """The longest prompt plus answer: what a cache row must hold."""
        return max((shard.max_total_tokens for shard in self.shards), default=0)

    def shard(self, name: str) -> Shard:
        """The shard of this name; raises KeyError."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Shard]:
        return {shard.name: shard for shard in self.shards}

    def changed_sources(self) -> list[str]:
        """Sources that have another size, or time of change, now than when they were planned."""
        now = {uri: source_stamp(uri) for uri in self.stamps}
        return [uri for uri, stamp in self.stamps.items() if now[uri] not in (None, stamp)]

    def check_origin(self, origin: dict[str, str]) -> None:
        """Raise InputError, naming what differs, if the plan was made for something else.

        What only one of the two knows is no difference: `jobs plan` needs no weights.
        """
        differing = [
            f"{key} was {self.origin[key]}, is {origin[key]}"
            for key in sorted(origin.keys() & self.origin.keys())
            if self.origin[key] != origin[key]
        ]
        if differing:
            raise InputError(
                f"the output was made with something else ({'; '.join(differing)}); choose another folder"
            )

    def check_refused(self, output: str, max_error_rate: float) -> None:
        """Raise TooManyErrorsError if so many rows cannot run that the rest is not worth it."""
        num_refused = sum(shard.num_refused for shard in self.shards)
        if num_refused > max_error_rate * self.num_rows:
            raise TooManyErrorsError(
                f"{num_refused} of {self.num_rows} rows cannot run, more than --max-error-rate "
                f"{max_error_rate} allows; the first: {self._first_refusal(output)}"
            )

    def _first_refusal(self, output: str) -> str:
        name = next(shard.name for shard in self.shards if shard.num_refused)
        return str(read_shard(output, name, ["error"]).column("error").drop_null()[0])

    def groups_of(self, shards: Sequence[Shard], limit: int | None) -> list[SourceGroup]:
        """What must be read to write these shards again."""
        only = {shard.name: shard.content for shard in shards}
        numbered = tuple((i, uri, name) for i, (uri, name) in enumerate(self.sources))
        if limit is not None:
            return [SourceGroup(numbered, limit, only)]
        lost = {shard.source for shard in shards}
        return [SourceGroup((source,), None, only) for source in numbered if source[0] in lost]

    def with_mended(self, shards: Iterable[Shard]) -> "Plan":
        """The plan with shards that were written again."""
        mended = {shard.name: shard for shard in shards}
        return replace(self, shards=tuple(mended.get(s.name, s) for s in self.shards))

    def save(self, output: str) -> None:
        """Write plan.json, which makes the plan complete."""
        content = {
            "origin": self.origin,
            "sources": self.sources,
            "stamps": self.stamps,
            "carried": schema_to_json(self.carried),
            "shards": [asdict(shard) for shard in self.shards],
        }
        failpoints.reach("plan")
        content["sha256"] = _digest(content)
        storage.write_atomic(_manifest(output), json.dumps(content, indent=1).encode())

    @classmethod
    def load(cls, output: str) -> "Plan | None":
        """The plan of an output, or None if there is no complete one; raises DamagedOutputError."""
        content = storage.read_bytes(_manifest(output))
        if content is None:
            return None
        try:
            raw = json.loads(content)
            if raw.pop("sha256") != _digest(raw):
                raise ValueError("other bytes than were written")
            shards = tuple(Shard(**shard) for shard in raw["shards"])
            sources = tuple((uri, name) for uri, name in raw["sources"])
            stamps = {uri: (size, changed) for uri, (size, changed) in raw["stamps"].items()}
            carried, origin = schema_from_json(raw["carried"]), dict(raw["origin"])
            return cls(shards, carried, sources, origin, stamps)
        except (ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
            raise DamagedOutputError(
                f"{_manifest(output)}: is damaged; put a copy of it back, or choose another output folder"
            ) from error


def name_sources(uris: Sequence[str], known: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Every source with its name for ids: how its file is called, or all of its URI if two are called so.

    Args:
        uris: the input, as it is now.
        known: what was planned before; it keeps its place and its name.

    Raises:
        InputError: what was planned is not in the input any more.
    """
    if gone := [uri for uri, _ in known if uri not in uris]:
        raise InputError(
            f"{gone[0]}: was planned in this output, and is not in the input any more; choose another "
            "folder"
        )
    planned = {uri for uri, _ in known}
    bases = {uri: uri.rsplit("/", 1)[-1] for uri in uris}
    taken = [name for _, name in known] + [bases[uri] for uri in uris if uri not in planned]
    added = [uri for uri in uris if uri not in planned]
    return [*known, *((u, bases[u] if taken.count(bases[u]) == 1 else u) for u in added)]


def group_sources(
    sources: Sequence[tuple[str, str]], limit: int | None, known: Plan | None = None
) -> list[SourceGroup]:
    """Sources that are planned side by side, or all in one group where a limit counts across them.

    What is in a `known` plan has been planned, and counts.
    """
    first = len(known.sources) if known else 0
    numbered = [(i, uri, name) for i, (uri, name) in enumerate(sources) if i >= first]
    if limit is None or not numbered:
        return [SourceGroup((source,)) for source in numbered]
    left = limit - (known.num_rows if known else 0)
    return [SourceGroup(tuple(numbered), left)] if left > 0 else []


def assemble(
    written: Iterable[tuple[Shard, pa.Schema]],
    output: str,
    sources: Sequence[tuple[str, str]],
    origin: dict[str, str],
    known: Plan | None = None,
) -> Plan:
    """The plan of all written shards, checked: there are rows, and no id occurs twice.

    Raises:
        InputError: it is not so, or columns of one name do not go together; parts of a `known` plan may
            be there, so its columns cannot change.
    """
    ordered = sorted(written, key=lambda item: item[0].name)
    carried = unify_carried(
        (schema, partial(_read_column, output, shard.name)) for shard, schema in ordered
    )
    before: tuple[Shard, ...] = ()
    stamps: dict[str, tuple[int, int]] = {}
    if known is not None:
        before, carried, stamps = known.shards, _within(known.carried, carried), known.stamps
    now = {uri: source_stamp(uri) for uri, _ in sources}
    stamps = {uri: stamp for uri, stamp in now.items() if stamp is not None} | stamps
    shards = (*before, *(shard for shard, _ in ordered))
    plan = Plan(shards, carried, tuple(sources), origin, stamps)
    if plan.num_rows == 0:
        raise InputError("the input holds no rows")
    _check_ids(plan, output)
    return plan


def _within(known: pa.Schema, added: pa.Schema) -> pa.Schema:
    """The known columns, if those of added files are the same."""
    for column in added:
        name = column.name.removeprefix(CARRIED)
        if column.name not in known.names:
            raise InputError(f"column {name!r} is in the added files only; choose another folder")
        if not _fits(column, known.field(column.name)):
            raise InputError(
                f"column {name!r} is {column.type} in the added files, and "
                f"{known.field(column.name).type} in this output; choose another folder"
            )
    return known


def _fits(added: pa.Field, known: pa.Field) -> bool:
    try:
        both = ((pa.schema([field]), _nothing) for field in (known, added))
        return bool(unify_carried(both) == pa.schema([known]))
    except InputError:
        return False


def _nothing(_name: str) -> pa.Array:
    return pa.array([], pa.null())


def _read_column(output: str, shard: str, name: str) -> pa.ChunkedArray:
    return read_shard(output, shard, [name]).column(name)


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
        table = read_shard(output, shard.name, ["id", "row"])
        for row in table.to_pylist():
            if hash(row["id"]) not in suspects:
                continue
            where = locate(plan.sources[shard.source][0], row["row"])
            if row["id"] in seen:
                raise InputError(
                    f"{where}: the id {row['id']!r} is also that of {seen[row['id']]}; ids must differ"
                )
            seen[row["id"]] = where


def _ids(output: str, shard: Shard) -> list[str]:
    ids: list[str] = read_shard(output, shard.name, ["id"]).column("id").to_pylist()
    return ids


def _digest(content: dict[str, Any]) -> str:
    """Names a plan, so that a byte that flipped is noticed."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _manifest(output: str) -> str:
    return storage.join(output, "plan", "plan.json")
