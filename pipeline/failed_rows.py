"""The rows of a part that failed, whole as the plan has them: OUT/errors."""

import io

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.schema import CARRIED
from pipeline.shards import to_parquet

_FAILURE = ["id", "sample_idx", "error_type", "error"]


def errors_uri(output: str, shard: str) -> str:
    """Where a shard's failed rows lie, whole."""
    return storage.join(output, "errors", f"errors-{shard}.parquet")


def write_errors(
    output: str, shard: str, table: pa.Table, plan: pa.Table, *, may_be_there: bool = True
) -> None:
    """Write the failed rows of a part as the plan has them, whole; no file where none failed."""
    uri = errors_uri(output, shard)
    rows = _failed_rows(table, plan)
    if len(rows):
        storage.write_atomic(uri, to_parquet(rows))
    elif may_be_there:
        storage.remove(uri)


def check_errors(output: str, shard: str, table: pa.Table) -> str:
    """What is wrong with the file of a part's failed rows; empty if nothing is."""
    content = storage.read_bytes(errors_uri(output, shard))
    failed = table.filter(table["error"].is_valid()).select(_FAILURE).to_pylist()
    if content is None:
        return "is missing" if failed else ""
    try:
        found = pq.read_table(io.BytesIO(content)).select(_FAILURE).to_pylist()
    except (OSError, KeyError, pa.ArrowException):
        return "is damaged"
    return "" if found == failed else "its rows are not those of the part that failed"


def _failed_rows(table: pa.Table, plan: pa.Table) -> pa.Table:
    """The plan's rows of the samples that failed, with what went wrong."""
    index_of = {row_id: index for index, row_id in enumerate(plan["id"].to_pylist())}
    failed = table.filter(table["error"].is_valid())
    indices = [index_of[row_id] for row_id in failed["id"].to_pylist()]
    rows = plan.take(pa.array(indices, pa.int64()))
    for name in _FAILURE[1:]:
        if name in rows.column_names:
            rows = rows.drop_columns([name])
        rows = rows.append_column(name, failed[name])
    renamed = [name.removeprefix(CARRIED) for name in rows.column_names]
    return rows.rename_columns(renamed) if len(set(renamed)) == len(renamed) else rows
