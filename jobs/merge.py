"""`merge`: the parts of a run as one data set, in files of a size that people like."""

import argparse
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jobs.cli import say
from jobs.folders import naming_output
from pipeline import storage
from pipeline.errors import DamagedPartError, InputError, InterruptedRunError
from pipeline.inspection import State, check_part, read_state
from pipeline.parts import part_uri, read_part
from pipeline.schema import output_schema

_FILE_BYTES = 512 * 2**20
_GROUP_BYTES = 64 * 2**20  # Of a row group: what a reader must hold at least.
_FORMATS = "expected .parquet, .jsonl (also .gz, .zst)"
_JSONL = (".jsonl", *(f".jsonl{packed}" for packed in storage.PACKED))


def merge(arguments: Sequence[str]) -> int:
    """Write the data set; returns the exit code.

    Raises:
        InputError: the target is there already, or has a format that is none of ours.
        InterruptedRunError: the run is not complete.
        DamagedPartError: a part is not what it was.
    """
    given = parse_merge(arguments)
    with naming_output(given.output):
        state = read_state(given.output)
    if state.damaged:
        raise DamagedPartError(state.damaged[0])
    if state.plan is None or not (state.is_complete or given.partial):
        raise InterruptedRunError(
            f"output {given.output}: the run is not complete (--partial merges what there is)"
        )
    with naming_output(given.into):
        _check_target(given.into)
        schema = output_schema(state.plan.carried)
        tables = _tables(given.output, state, schema, keep_errors=given.errors)
        if given.into.endswith(_JSONL):
            num_rows = _write_jsonl(given.into, tables)
        elif given.into.endswith(".parquet"):
            num_rows = _write_parquet(given.into, tables, schema)
        else:
            num_rows = _write_folder(given.into, tables, schema, given.file_bytes)
    left_out = 0 if given.errors else state.summary.num_errors
    failed = f"; {left_out} failed ones are left out (--errors keeps them)" if left_out else ""
    say(f"{num_rows} rows written to {given.into}{failed}")
    return 0


def parse_merge(arguments: Sequence[str]) -> argparse.Namespace:
    """What a command line asks for; raises SystemExit where it is none, or asks for help."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs merge", description="The parts of a run as one data set."
    )
    parser.add_argument("output", metavar="OUT", help="the run's output: a folder or a URI")
    parser.add_argument(
        "--into",
        required=True,
        metavar="FILE_OR_FOLDER",
        help=f"a file ({', '.join((*_JSONL, '.parquet'))}), or a new folder for Parquet files",
    )
    parser.add_argument("--errors", action="store_true", help="keep rows that failed")
    parser.add_argument("--partial", action="store_true", help="merge what is done so far")
    parser.add_argument(
        "--file-bytes", type=_positive, default=_FILE_BYTES, help="of a file in a folder, about"
    )
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _check_target(uri: str) -> None:
    if re.search(r"\.[A-Za-z]\w{0,7}$", uri) and not uri.endswith((*_JSONL, ".parquet")):
        raise InputError(f"--into {uri}: unknown format; {_FORMATS}, or a folder's name")
    there = storage.is_folder(uri) and not storage.is_empty_folder(uri)
    if there or (not storage.is_folder(uri) and storage.exists(uri)):
        raise InputError(f"--into {uri}: is there already")


def _tables(
    output: str, state: State, schema: pa.Schema, *, keep_errors: bool
) -> Iterator[pa.Table]:
    """The rows of the parts, in the order of the plan; raises DamagedPartError."""
    assert state.plan is not None
    for shard in state.plan.shards:
        if shard.name in state.done:
            table, content = read_part(output, shard.name)
            wrong = check_part(table, schema, shard, output, state.config.sampling)
            if hashlib.sha256(content).hexdigest() != state.done[shard.name].sha256:
                wrong = "is not the file that was committed"
            if wrong:
                raise DamagedPartError(f"{part_uri(output, shard.name)}: {wrong}")
            table = table if keep_errors else table.filter(pc.is_null(table["error"]))
            if len(table):
                yield table.replace_schema_metadata()


def _write_jsonl(uri: str, tables: Iterable[pa.Table]) -> int:
    num_rows = 0
    with storage.open_write(uri) as file:
        for table in tables:
            for row in table.to_pylist():
                file.write(json.dumps(row, ensure_ascii=False, default=_to_json).encode() + b"\n")
            num_rows += len(table)
    return num_rows


def _to_json(value: Any) -> str:
    """Times, and bytes that somebody carried through."""
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _write_parquet(uri: str, tables: Iterable[pa.Table], schema: pa.Schema) -> int:
    num_rows = 0
    with (
        storage.open_write(uri) as file,
        pq.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        for group in _groups(tables):
            writer.write_table(group)
            num_rows += len(group)
    return num_rows


def _write_folder(
    folder: str, tables: Iterable[pa.Table], schema: pa.Schema, file_bytes: int
) -> int:
    """Files of about a size, one at least; each is there when it is whole."""
    groups = _groups(tables)
    num_rows = 0
    for number, first in enumerate(chain([next(groups, schema.empty_table())], groups)):
        uri = storage.join(folder, f"data-{number:05d}.parquet")
        with (
            storage.open_write(uri) as file,
            pq.ParquetWriter(file, schema, compression="zstd") as writer,
        ):
            writer.write_table(first)
            num_rows += len(first)
            while file.tell() < file_bytes and (group := next(groups, None)) is not None:
                writer.write_table(group)
                num_rows += len(group)
    return num_rows


def _groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Tables put together to row groups that are worth reading alone."""
    waiting: list[pa.Table] = []
    num_bytes = 0
    for table in tables:
        waiting.append(table)
        num_bytes += table.nbytes
        if num_bytes >= _GROUP_BYTES:
            yield pa.concat_tables(waiting)
            waiting, num_bytes = [], 0
    if waiting:
        yield pa.concat_tables(waiting)
