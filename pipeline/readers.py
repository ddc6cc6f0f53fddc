"""Files to raw rows. A line that is no row is a refusal, not the end of the file."""

import codecs
import csv
import io
import json
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq
from backports.zstd import ZstdError

from pipeline import storage
from pipeline.errors import InputError

# What a damaged file, packed or not, is answered with.
_TEXT_BYTES = 2**16
_DAMAGED = (OSError, EOFError, zlib.error, ZstdError)


@dataclass(frozen=True)
class RawRow:
    """A row as its file has it: the columns, or the reason why it has none.

    `row` counts from 1: the line of a text file (the first one of a row that takes several), the row of
    another; `where` says so. `text` is what stands there if it is no row (its beginning, if it is long).
    """

    row: int
    where: str
    columns: dict[str, Any] | None
    error: str | None = None
    text: str | None = None


def read_jsonl(uri: str) -> Iterator[RawRow]:
    """A JSON object a line; blank lines are none."""
    for number, line in _lines(uri):
        if line.strip():
            yield _parse_line(line, number, f"{uri}: line {number}")


def read_text(uri: str) -> Iterator[RawRow]:
    """A prompt a line; blank lines are none."""
    for number, line in _lines(uri):
        where = f"{uri}: line {number}"
        if not line.strip():
            continue
        try:
            yield RawRow(number, where, {"prompt": line.rstrip(b"\r\n").decode()})
        except UnicodeDecodeError as error:
            yield _bad_row(number, where, _not_utf8(error), line)


def read_csv(uri: str, delimiter: str) -> Iterator[RawRow]:
    """Rows under a header; every value is a string, and an empty one is null.

    Raises:
        InputError: there is no header, or it names a column twice.
    """
    # A row may take several lines, so bytes that are no UTF-8 are carried along until it is whole.
    lines = (line.decode(errors="surrogateescape") for _, line in _lines(uri))
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    names: list[str] | None = None
    before = 0
    while True:
        number, where = before + 1, f"{uri}: line {before + 1}"
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield _bad_row(number, where, f"bad CSV ({error})", b"")
            before = reader.line_num
            continue
        before = reader.line_num
        if not any(fields):
            continue
        if names is None:
            names = _check_header(fields, uri)
        else:
            yield _csv_row(fields, names, number, where)


def read_parquet(uri: str) -> Iterator[RawRow]:
    """The rows of a Parquet file, in batches."""
    row = 1
    try:
        with _open_parquet(uri) as file:
            for batch in pq.ParquetFile(file).iter_batches(batch_size=1024):
                for columns in batch.to_pylist():
                    yield RawRow(row, f"{uri}: row {row}", columns)
                    row += 1
    except (*_DAMAGED, pa.ArrowException, OverflowError, ValueError) as error:
        raise InputError(f"{uri}: cannot be read as Parquet at row {row} ({error})") from error


def parquet_types(uri: str) -> dict[str, pa.DataType]:
    """The types a Parquet file declares for its columns."""
    try:
        with _open_parquet(uri) as file:
            return {field.name: _plain(field.type) for field in pq.read_schema(file)}
    except (*_DAMAGED, pa.ArrowException) as error:
        raise InputError(f"{uri}: cannot be read as Parquet ({error})") from error


def read_hub(uri: str) -> Iterator[RawRow]:
    """The rows of a data set of the Hugging Face hub (see `parse_hub`), streamed."""
    dataset, row = _load_hub(uri), 1
    try:
        for columns in dataset:
            yield RawRow(row, f"{uri}: row {row}", dict(columns))
            row += 1
    except Exception as error:  # Foreign files in foreign code: any error says what is wrong.
        raise InputError(f"{uri}: cannot be read at row {row} ({error})") from error


def hub_types(uri: str) -> dict[str, pa.DataType]:
    """The types a data set of the hub declares for its columns; none where it declares nothing."""
    features = _load_hub(uri).features
    schema = features.arrow_schema if features else ()
    return {field.name: field.type for field in schema}


def parse_hub(uri: str) -> tuple[str, str | None, str]:
    """Name (or folder), configuration and split of hf://NAME[[:CONFIGURATION]:SPLIT].

    Raises:
        InputError: it has another form.
    """
    name, *rest = uri.removeprefix("hf://").split(":")
    if not name or len(rest) > 2 or not all(rest):
        raise InputError(
            f"{uri}: expected hf://NAME, hf://NAME:SPLIT or hf://NAME:CONFIGURATION:SPLIT"
        )
    return name, rest[0] if len(rest) == 2 else None, rest[-1] if rest else "train"


def _load_hub(uri: str) -> Any:
    import datasets

    name, configuration, split = parse_hub(uri)
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(name, configuration, split=split, streaming=True)
    except Exception as error:  # As above.
        raise InputError(f"{uri}: cannot be opened ({error})") from error


def _lines(uri: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, numbered from 1, without a byte order mark."""
    number = 0
    try:
        with storage.open_read(uri) as file:
            for number, line in enumerate(file, start=1):
                yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
    except _DAMAGED as error:
        raise InputError(f"{uri}: damaged after line {number} ({error})") from error


def _parse_line(line: bytes, row: int, where: str) -> RawRow:
    try:
        columns = json.loads(line.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        return _bad_row(row, where, _not_utf8(error), line)
    except json.JSONDecodeError as error:  # Of one line; its own line number would confuse.
        return _bad_row(row, where, f"bad JSON ({error.msg} at column {error.colno})", line)
    except ValueError as error:
        return _bad_row(row, where, f"bad JSON ({error})", line)
    except RecursionError:
        return _bad_row(row, where, "bad JSON (nested too deeply)", line)
    if not isinstance(columns, dict):
        return _bad_row(row, where, "not a JSON object", line)
    if rb"\ud" in line.lower() and _has_lone_surrogate(columns):
        return _bad_row(row, where, "not Unicode (a lone surrogate, \\udXXX)", line)
    return RawRow(row, where, columns)


def _bad_row(row: int, where: str, reason: str, line: bytes) -> RawRow:
    text = line[:_TEXT_BYTES].rstrip(b"\r\n").decode(errors="replace")
    return RawRow(row, where, None, f"{where}: {reason}", text)


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8 ({error.reason} at byte {error.start})"


def _has_lone_surrogate(columns: dict[str, Any]) -> bool:
    """JSON can spell half a character; UTF-8 and Parquet cannot hold it."""
    try:
        json.dumps(columns, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_header(names: list[str], uri: str) -> list[str]:
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{uri}: the header names the column {twice[0]!r} twice")
    return names


def _csv_row(fields: list[str], names: list[str], row: int, where: str) -> RawRow:
    line = ",".join(fields).encode(errors="surrogateescape")
    if len(fields) != len(names):
        reason = f"bad CSV ({len(fields)} fields, the header has {len(names)})"
        return _bad_row(row, where, reason, line)
    try:
        line.decode()
    except UnicodeDecodeError:
        return _bad_row(row, where, "not UTF-8", line)
    return RawRow(row, where, {k: v or None for k, v in zip(names, fields, strict=True)})


def _plain(kind: pa.DataType) -> pa.DataType:
    """What a dictionary's entries are, which is how its values are read."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _open_parquet(uri: str) -> IO[bytes]:
    """A Parquet file is read from its end, which a packed one lets us do in memory only."""
    file = storage.open_read(uri)
    if not storage.is_packed(uri):
        return file
    with file:
        return io.BytesIO(file.read())
