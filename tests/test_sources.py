"""Prompt files to raw rows: a line that is no row is a row with a reason, never the end of the file."""

import gzip
import json
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import InputError
from pipeline.sources import RawRow, check_source, read_rows


def rows_of(path: Path) -> list[RawRow]:
    check_source(str(path))
    return list(read_rows(str(path)))


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.ndjson", "a.ndjson.gz"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    content = b'{"prompt": "a", "k": [1, null]}\n{"prompt": "\xc3\xa9"}\n'
    rows = rows_of(write(tmp_path / name, content))
    assert [row.columns for row in rows] == [{"prompt": "a", "k": [1, None]}, {"prompt": "é"}]
    assert [row.row for row in rows] == [1, 2]
    assert [row.where for row in rows] == [f"{tmp_path / name}: line {n}" for n in (1, 2)]
    assert [row.error for row in rows] == [None, None]


def test_mark_carriage_returns_blank_lines_and_no_last_newline(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"a": 1}\r\n\r\n   \n{"a": 2}\r\n\n{"a": 3}'
    rows = rows_of(write(tmp_path / "a.jsonl", content))
    assert [row.columns for row in rows] == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert [row.row for row in rows] == [1, 4, 6]  # Blank lines are no rows,
    assert [row.where.rsplit(" ", 1)[1] for row in rows] == ["1", "4", "6"]  # but they are lines.


def test_line_separators_inside_a_string_end_no_line(tmp_path: Path) -> None:
    text = "a\u2028b\u0085c\x0bd"
    content = json.dumps({"prompt": text}, ensure_ascii=False).replace("\\u000b", "\\u000b")
    assert [row.columns for row in rows_of(write(tmp_path / "a.jsonl", content.encode()))] == [
        {"prompt": text}
    ]


# name -> (the second of three lines, what its error must say)
BAD_LINES: dict[str, tuple[bytes, str]] = {
    "cut off": (b'{"prompt": "a', "bad JSON"),
    "single quotes": (b"{'prompt': 'a'}", "double quotes at column 2)"),
    "two objects": (b'{"a": 1} {"a": 2}', "bad JSON"),
    "a trailing comma": (b'{"a": 1,}', "bad JSON"),
    "an array": (b"[1, 2]", "not a JSON object"),
    "a string": (b'"prompt"', "not a JSON object"),
    "null": (b"null", "not a JSON object"),
    "NaN": (b'{"prompt": "a", "x": NaN}', "NaN"),
    "Infinity": (b'{"prompt": "a", "x": [-Infinity]}', "Infinity"),
    "not UTF-8": (b'{"prompt": "\xff"}', "not UTF-8"),
    "Latin-1": ('{"prompt": "é"}'.encode("latin-1"), "not UTF-8"),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16-le"), "bad JSON"),
    "half a character": (b'{"prompt": "\\ud83d"}', "surrogate"),
    "half a character in capitals": (b'{"prompt": "\\uDE00"}', "surrogate"),
    "half a character in a key": (b'{"a": [{"\\ud83d": 1}]}', "surrogate"),
    "nested too deeply": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "too deeply"),
    "a number of 5000 digits": (b'{"a": ' + b"9" * 5000 + b"}", "bad JSON"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_says_where_and_harms_no_neighbour(tmp_path: Path, name: str) -> None:
    line, reason = BAD_LINES[name]
    content = b"\n".join([b'{"prompt": "first"}', b"", line, b'{"prompt": "last"}', b""])
    path = write(tmp_path / "a.jsonl", content)
    first, bad, last = rows_of(path)
    assert (first.columns, last.columns) == ({"prompt": "first"}, {"prompt": "last"})
    assert (bad.columns, bad.row) == (None, 3)
    assert bad.error is not None
    assert bad.error.startswith(f"{path}: line 3: ")
    assert reason in bad.error
    assert "line" not in bad.error.removeprefix(f"{path}: line 3: ")  # Its only line is this one.
    assert bad.text == line[: 2**16].decode(errors="replace")


def test_a_whole_character_spelled_as_two_escapes(tmp_path: Path) -> None:
    (row,) = rows_of(write(tmp_path / "a.jsonl", b'{"prompt": "\\ud83d\\ude00"}'))
    assert row.columns == {"prompt": "\U0001f600"}


def test_a_file_without_rows(tmp_path: Path) -> None:
    for content in (b"", b"\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"):
        assert rows_of(write(tmp_path / "a.jsonl", content)) == [], content


def gz_of(num_rows: int) -> bytes:
    lines = [json.dumps({"prompt": f"p{i * 7919}"}) for i in range(num_rows)]
    return gzip.compress("\n".join(lines).encode(), mtime=0)


def corrupt(content: bytes, at: Sequence[int]) -> bytes:
    damaged = bytearray(content)
    for i in at:
        damaged[i] ^= 0xFF
    return bytes(damaged)


# What became of a gz file of 200 rows (about 900 bytes).
DAMAGES = {
    "cut off": lambda content: content[: len(content) // 2],
    "no gz": lambda _: b'{"prompt": "a"}\n',
    "wrong checksum": lambda content: corrupt(content, [-5]),
    "garbage inside": lambda content: corrupt(content, range(100, 200)),
    "a block of no kind": lambda content: content[:10] + b"\x07" + content[11:],
    "garbage behind": lambda content: content + b"garbage",
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_gz_names_the_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(DAMAGES[name](gz_of(200)))
    with pytest.raises(InputError) as raised:
        list(read_rows(str(path)))
    assert str(path) in str(raised.value)


COLUMNS: dict[str, pa.Array] = {
    "prompt": pa.array(["a", None, "c"]),
    "when": pa.array(
        [datetime(2026, 1, 2, 3, 4, 5, 6, UTC), None, None], pa.timestamp("us", "UTC")
    ),
    "day": pa.array([date(2026, 1, 2), None, None]),
    "price": pa.array([Decimal("1.50"), None, None]),
    "raw": pa.array([b"\xff", None, b""]),
    "tags": pa.array([["x", None], None, []]),
    "nothing": pa.nulls(3),
    "struct": pa.array([{"a": 1, "b": None}, None, {"a": None, "b": 2.5}]),
    "category": pa.array(["u", "v", "u"]).dictionary_encode(),
}


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(COLUMNS), path, row_group_size=2)
    rows = rows_of(path)
    assert [row.where for row in rows] == [f"{path}: row {n}" for n in (1, 2, 3)]
    assert [row.row for row in rows] == [1, 2, 3]
    assert rows[0].columns == {
        "prompt": "a",
        "when": datetime(2026, 1, 2, 3, 4, 5, 6, UTC),
        "day": date(2026, 1, 2),
        "price": Decimal("1.50"),
        "raw": b"\xff",
        "tags": ["x", None],
        "nothing": None,
        "struct": {"a": 1, "b": None},
        "category": "u",
    }
    assert rows[1].columns == dict.fromkeys(COLUMNS) | {"category": "v"}


def test_parquet_in_many_batches(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": [str(i) for i in range(2500)]}), path, row_group_size=700)
    rows = rows_of(path)
    assert [row.row for row in rows] == list(range(1, 2501))
    assert [(row.columns or {})["prompt"] for row in rows] == [str(i) for i in range(2500)]


def test_a_time_that_python_cannot_hold(tmp_path: Path) -> None:
    """Year 20,000 is legal in Parquet. Whatever is made of it, it names the file."""
    path = tmp_path / "a.parquet"
    far = pa.array([0, 570_000_000_000], pa.timestamp("s"))
    pq.write_table(pa.table({"prompt": ["a", "b"], "when": far}), path)
    try:
        rows = list(read_rows(str(path)))
    except InputError as error:
        if str(path) in str(error):
            return
        raise
    assert len(rows) == 2


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b'{"prompt": "a"}', b"PAR1" + bytes(100) + b"PAR1"]
)
def test_what_is_no_parquet_names_the_file(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path / "a.parquet", content)
    with pytest.raises(InputError) as raised:
        list(read_rows(str(path)))
    assert str(path) in str(raised.value)


def test_a_parquet_damaged_in_the_middle_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": [f"p{i * 7919}" for i in range(2000)]}), path)
    path.write_bytes(corrupt(path.read_bytes(), range(50, 4000)))
    with pytest.raises(InputError) as raised:
        list(read_rows(str(path)))
    assert str(path) in str(raised.value)


def refusal(uri: Any) -> str:
    with pytest.raises(InputError) as raised:
        check_source(str(uri))
    assert str(uri) in str(raised.value)
    return str(raised.value)


def test_sources_are_checked_before_anything_starts(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "missing.jsonl")
    assert "unknown format" in refusal(write(tmp_path / "a.xlsx", b"prompt\n"))
    (tmp_path / "folder.jsonl").mkdir()
    assert "folder" in refusal(tmp_path / "folder.jsonl")
    refusal("no-such-scheme://bucket/a.jsonl")
    check_source(str(write(tmp_path / "a.jsonl", b"")))
    check_source(f"file://{tmp_path / 'a.jsonl'}")


def test_a_file_uri_is_read_like_its_path(tmp_path: Path) -> None:
    path = write(tmp_path / "a b#c.jsonl", b'{"prompt": "a"}')
    (row,) = read_rows(f"file://{path}")
    assert row.columns == {"prompt": "a"}
    assert rows_of(path)[0].columns == {"prompt": "a"}
