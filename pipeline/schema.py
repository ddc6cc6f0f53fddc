"""The columns of plan shards and of the output: always the same, whatever happened to the rows."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from pipeline.admission import AdmittedRow
from pipeline.errors import InputError

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


def plan_table(rows: Sequence[AdmittedRow]) -> pa.Table:
    """The table of one prompt shard; carried columns keep the types their values have."""
    columns = {name: [getattr(row, name) for row in rows] for name in PLAN_SCHEMA.names}
    table = pa.table(columns, schema=PLAN_SCHEMA)
    names = dict.fromkeys(name for row in rows for name in row.carried)
    for name in names:
        values = [row.carried.get(name) for row in rows]
        try:
            array = pa.array(values)
        except (pa.ArrowException, OverflowError) as error:
            raise InputError(
                f"{rows[0].source}: column {name!r} cannot be carried through: its values do not "
                f"share a type Parquet knows ({error})"
            ) from error
        table = table.append_column(CARRIED + name, array)
    return table


def unify_carried(schemas: Iterable[pa.Schema]) -> pa.Schema:
    """One schema for the carried columns of all shards; raises InputError naming a conflict."""
    carried: dict[str, pa.DataType] = {}
    for schema in schemas:
        for field in schema:
            if not field.name.startswith(CARRIED):
                continue
            name, known = field.name, carried.get(field.name, field.type)
            try:
                both = [pa.schema([(name, known)]), pa.schema([(name, field.type)])]
                unified = pa.unify_schemas(both, promote_options="permissive")
            except pa.ArrowException as error:
                raise InputError(
                    f"column {name.removeprefix(CARRIED)!r} is {known} in one place of the input "
                    f"and {field.type} in another"
                ) from error
            carried[name] = unified.field(name).type
    return pa.schema(list(carried.items()))


def output_schema(carried: pa.Schema) -> pa.Schema:
    """The output's schema; a carried column with one of our names is called input_<name>."""
    fields = list(OUTPUT_SCHEMA)
    for field in carried:
        # A column that is null in every row has no type of its own.
        kind = pa.string() if pa.types.is_null(field.type) else field.type
        fields.append(pa.field(output_name(field.name), kind))
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
