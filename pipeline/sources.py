"""Prompt files to raw rows. A line that is no row is a refusal, not the end of the file."""

import codecs
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.errors import InputError

_JSONL = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
_PARQUET = (".parquet",)


@dataclass(frozen=True)
class RawRow:
    """A row as its file has it: the columns, or the reason why it has none.

    `row` is the line of a JSONL file, the row of a Parquet file, counted from 1; `where` says so.
    """

    row: int
    where: str
    columns: dict[str, Any] | None
    error: str | None = None


def locate(uri: str, row: int) -> str:
    """Where a person finds a row."""
    return f"{uri}: {'row' if uri.endswith(_PARQUET) else 'line'} {row}"


def check_source(uri: str) -> None:
    """Refuse a source that cannot be read, before anything else is started."""
    if not uri.endswith(_JSONL + _PARQUET):
        raise InputError(f"{uri}: unknown format; expected one of {', '.join(_JSONL + _PARQUET)}")
    if storage.is_local(uri) and storage.local_path(uri).is_dir():
        raise InputError(f"{uri}: is a folder; name the files in it")
    try:
        found = storage.exists(uri)
    except (OSError, ValueError) as error:
        raise InputError(f"{uri}: cannot be opened ({error})") from error
    if not found:
        raise InputError(f"{uri}: no such file")


def read_rows(uri: str) -> Iterator[RawRow]:
    """Yield the rows of a file in order; raises InputError if the file itself is unreadable."""
    return _read_parquet(uri) if uri.endswith(_PARQUET) else _read_jsonl(uri)


def column_types(uri: str) -> dict[str, pa.DataType]:
    """The types a file declares for its columns; none for JSONL."""
    if not uri.endswith(_PARQUET):
        return {}
    try:
        with storage.open_read(uri) as file:
            return {field.name: field.type for field in pq.read_schema(file)}
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{uri}: cannot be read as Parquet ({error})") from error


def _read_jsonl(uri: str) -> Iterator[RawRow]:
    number = 0
    try:
        with storage.open_read(uri) as file:
            for number, line in enumerate(file, start=1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    yield _parse_line(line, number, locate(uri, number))
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{uri}: damaged after line {number} ({error})") from error


def _parse_line(line: bytes, row: int, where: str) -> RawRow:
    try:
        columns = json.loads(line.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        return RawRow(
            row, where, None, f"{where}: not UTF-8 ({error.reason} at byte {error.start})"
        )
    except json.JSONDecodeError as error:  # Of one line; its own line number would confuse.
        reason = f"{error.msg} at column {error.colno}"
        return RawRow(row, where, None, f"{where}: bad JSON ({reason})")
    except ValueError as error:
        return RawRow(row, where, None, f"{where}: bad JSON ({error})")
    except RecursionError:
        return RawRow(row, where, None, f"{where}: bad JSON (nested too deeply)")
    if not isinstance(columns, dict):
        return RawRow(row, where, None, f"{where}: not a JSON object")
    if rb"\ud" in line.lower() and _has_lone_surrogate(columns):
        return RawRow(row, where, None, f"{where}: not Unicode (a lone surrogate, \\udXXX)")
    return RawRow(row, where, columns)


def _has_lone_surrogate(columns: dict[str, Any]) -> bool:
    """JSON can spell half a character; UTF-8 and Parquet cannot hold it."""
    try:
        json.dumps(columns, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _read_parquet(uri: str) -> Iterator[RawRow]:
    row = 1
    try:
        with storage.open_read(uri) as file:
            for batch in pq.ParquetFile(file).iter_batches(batch_size=1024):
                for columns in batch.to_pylist():
                    yield RawRow(row, locate(uri, row), columns)
                    row += 1
    except (OSError, pa.ArrowException, OverflowError, ValueError) as error:
        raise InputError(f"{uri}: cannot be read as Parquet at row {row} ({error})") from error
