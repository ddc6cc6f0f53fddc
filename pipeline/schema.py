"""The columns of plan shards and of the output: always the same, whatever happened to the rows."""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pipeline.admission import AdmittedRow
from pipeline.errors import InputError
from pipeline.sources import locate

CARRIED = "carried."  # Prefix of carried columns inside the plan.

_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
_TOP_LOGPROB = pa.struct([("token_id", pa.int32()), ("logprob", pa.float64())])
_LOGPROB = pa.struct(
    [
        ("token_id", pa.int32()),
        ("logprob", pa.float64()),
        ("rank", pa.int32()),
        ("top", pa.list_(_TOP_LOGPROB)),
    ]
)

PLAN_SCHEMA = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        ("prompt", pa.string()),
        ("messages", pa.list_(_MESSAGE)),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("sampling_params", pa.string()),
        ("error_type", pa.string()),
        ("error", pa.string()),
        ("raw", pa.string()),
        ("prompt_digest", pa.binary(16)),
        ("first_shard", pa.string()),
        ("first_row", pa.int32()),
        pa.field("num_truncated_tokens", pa.int32(), nullable=False),
    ]
)

OUTPUT_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("sample_idx", pa.int32(), nullable=False),
        ("prompt", pa.string()),
        ("messages", pa.list_(_MESSAGE)),
        ("generated_text", pa.string()),
        ("generated_tokens", pa.list_(pa.int32())),
        ("num_input_tokens", pa.int32()),
        ("num_generated_tokens", pa.int32()),
        pa.field("finish_reason", pa.string(), nullable=False),
        ("stop_reason", pa.string()),
        ("cumulative_logprob", pa.float64()),
        ("logprobs", pa.list_(_LOGPROB)),
        ("error", pa.string()),
        ("error_type", pa.string()),
        ("answer_of", pa.string()),
        ("attempt", pa.int32()),
        ("model", pa.string()),
        ("seed", pa.int64()),
        ("device", pa.string()),
        ("time_taken", pa.float64()),
        ("finished_at", pa.timestamp("us", tz="UTC")),
        ("num_steps", pa.int32()),
        ("num_spec_steps", pa.int32()),
        ("num_draft_tokens", pa.int32()),
        ("num_accepted_draft_tokens", pa.int32()),
        ("num_spec_tokens", pa.int32()),
        ("acceptance_histogram", pa.list_(pa.int32())),
        ("mean_acceptance_length", pa.float64()),
        ("draft_acceptance_rate", pa.float64()),
    ]
)


def plan_table(rows: Sequence[AdmittedRow], types: Mapping[str, pa.DataType], uri: str) -> pa.Table:
    """The table of one prompt shard, made of a source.

    Carried columns have the types their file declares, or those of their values. Parquet has no
    empty object: `{}` is carried as null.
    """
    columns = {name: [getattr(row, name) for row in rows] for name in PLAN_SCHEMA.names}
    table = pa.table(columns, schema=PLAN_SCHEMA)
    names = dict.fromkeys(name for row in rows for name in row.carried)
    for name in names:
        values = [_without_empty_objects(row.carried.get(name)) for row in rows]
        try:
            array = pa.array(values, type=types.get(name))
        except (pa.ArrowException, OverflowError) as error:
            raise InputError(
                f"{locate(uri, _first_misfit(rows, values, types.get(name)))}: column {name!r} cannot be "
                "carried through: its value has no type in common with those before it that Parquet "
                f"knows ({error}); make them of one type, strings for one, or leave the column out"
            ) from error
        table = table.append_column(CARRIED + name, array)
    return table


def _first_misfit(rows: Sequence[AdmittedRow], values: list[Any], kind: pa.DataType | None) -> int:
    """The row of the first value that has no type in common with those before it."""

    def fits(count: int) -> bool:
        try:
            pa.array(values[:count], type=kind)
        except (pa.ArrowException, OverflowError):
            return False
        return True

    first = bisect_left(range(len(rows)), True, key=lambda i: not fits(i + 1))
    return rows[first].row


def _without_empty_objects(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_empty_objects(v) for key, v in value.items()} or None
    if isinstance(value, list):
        return [_without_empty_objects(v) for v in value]
    return value


def unify_carried(tables: Iterable[tuple[pa.Schema, Callable[[str], pa.Array]]]) -> pa.Schema:
    """One schema for the carried columns of all shards.

    Takes each shard's schema and a way to read one of its columns, which is used only where a type
    must be widened: every value has to survive that.

    Raises:
        InputError: a column whose types or values do not go together, by name.
    """
    shards = list(tables)
    carried: dict[str, pa.DataType] = {}
    for schema, _ in shards:
        for field in schema:
            if field.name.startswith(CARRIED):
                carried[field.name] = _widen(field, carried.get(field.name, field.type))
    for schema, read_column in shards:
        for name in [
            n for n in schema.names if n in carried and schema.field(n).type != carried[n]
        ]:
            try:
                read_column(name).cast(carried[name])
            except pa.ArrowException as error:
                raise InputError(
                    f"column {name.removeprefix(CARRIED)!r} is {carried[name]} in one place of the "
                    f"input, and elsewhere holds what does not fit that ({error})"
                ) from error
    unified = pa.schema(list(carried.items()))
    output_schema(unified)
    return unified


def _widen(field: pa.Field, known: pa.DataType) -> pa.DataType:
    try:
        both = [pa.schema([(field.name, known)]), pa.schema([field])]
        return pa.unify_schemas(both, promote_options="permissive").field(0).type
    except pa.ArrowException as error:
        raise InputError(
            f"column {field.name.removeprefix(CARRIED)!r} is {known} in one place of the input and "
            f"{field.type} in another"
        ) from error


def output_schema(carried: pa.Schema) -> pa.Schema:
    """The output's schema; a carried column with one of our names is called input_<name>."""
    fields = list(OUTPUT_SCHEMA)
    for field in carried:
        # A column that is null in every row has no type of its own.
        kind = pa.string() if pa.types.is_null(field.type) else field.type
        fields.append(pa.field(output_name(field.name), kind))
    names = [field.name for field in fields]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(
            f"column {twice[0]!r} would be there twice in the output, as the input has both "
            f"{twice[0].removeprefix('input_')!r} and {twice[0]!r}; rename one"
        )
    return pa.schema(fields)


def output_name(plan_name: str) -> str:
    """What a carried column is called in the output."""
    name = plan_name.removeprefix(CARRIED)
    return f"input_{name}" if name in OUTPUT_SCHEMA.names else name


def output_table(
    rows: Sequence[dict[str, Any]], plan: pa.Table, indices: Sequence[int], schema: pa.Schema
) -> pa.Table:
    """The table of one part: `rows` in our columns, the carried ones taken from the plan's rows."""
    arrays = [
        pa.array([row[field.name] for row in rows], type=field.type) for field in OUTPUT_SCHEMA
    ]
    carried = {output_name(n): n for n in plan.column_names if n.startswith(CARRIED)}
    taken = plan.take(pa.array(indices, pa.int64()))
    for field in list(schema)[len(OUTPUT_SCHEMA) :]:
        if field.name in carried:
            arrays.append(taken.column(carried[field.name]).cast(field.type).combine_chunks())
        else:
            arrays.append(pa.nulls(len(rows), field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def schema_digest(schema: pa.Schema) -> str:
    """Name a schema by its columns and types (sha256, hex), whatever metadata it carries."""
    text = "\n".join(f"{field.name}: {field.type} {field.nullable}" for field in schema)
    text = text.replace("element: ", "item: ")  # What Parquet calls a list's values.
    return hashlib.sha256(text.encode()).hexdigest()


def schema_to_json(schema: pa.Schema) -> str:
    """A schema as text, for a manifest."""
    serialized: bytes = schema.serialize().to_pybytes()
    return serialized.hex()


def schema_from_json(text: str) -> pa.Schema:
    """The schema `schema_to_json` wrote."""
    return pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(text)))


def footer(metadata: dict[str, Any]) -> dict[bytes, bytes]:
    """Provenance as Parquet key/value metadata."""
    return {b"quasar": json.dumps(metadata, sort_keys=True).encode()}
