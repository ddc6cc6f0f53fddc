"""Other formats than JSON lines and Parquet (test_sources.py), and what files are packed with."""

import gzip
import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd

from pipeline.errors import InputError
from pipeline.readers import RawRow
from pipeline.sources import check_source, column_types, locate, read_rows


def rows_of(path: Path, content: bytes) -> list[RawRow]:
    pack = {".gz": gzip.compress, ".zst": zstd.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(content))
    check_source(str(path))
    return list(read_rows(str(path)))


def columns_of(path: Path, content: bytes) -> list[dict[str, Any] | None]:
    return [row.columns for row in rows_of(path, content)]


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_every_format_may_be_packed(tmp_path: Path, packed: str) -> None:
    row = {"prompt": "é", "n": "1"}
    table = io.BytesIO()
    pq.write_table(pa.table({"prompt": ["é"], "n": ["1"]}), table)
    contents = {
        "jsonl": '{"prompt": "é", "n": "1"}\n'.encode(),
        "ndjson": '{"prompt": "é", "n": "1"}'.encode(),
        "csv": "prompt,n\né,1\n".encode(),
        "tsv": "prompt\tn\né\t1".encode(),
        "parquet": table.getvalue(),
    }
    for format_name, content in contents.items():
        assert columns_of(tmp_path / f"a.{format_name}{packed}", content) == [row]
    assert columns_of(tmp_path / f"a.txt{packed}", "é\n".encode()) == [{"prompt": "é"}]
    assert column_types(str(tmp_path / f"a.parquet{packed}")) == dict.fromkeys(row, pa.string())


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt", "a.parquet"])
@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_a_damaged_package_is_named(tmp_path: Path, name: str, packed: str) -> None:
    path = tmp_path / (name + packed)
    line = b"".join(b'{"prompt": "%d"}\n' % i for i in range(9999))
    whole = gzip.compress(line) if packed == ".gz" else zstd.compress(line)
    for content in (whole[: len(whole) // 2], b"no archive", whole[:20] + b"x" * 40 + whole[60:]):
        path.write_bytes(content)
        with pytest.raises(InputError, match=str(path)):
            list(read_rows(str(path)))


class TestText:
    def test_a_prompt_a_line(self, tmp_path: Path) -> None:
        rows = rows_of(tmp_path / "a.txt", "\ufeffa b \r\n\n  \nc\u2028d\n\te".encode())
        assert [row.columns for row in rows] == [{"prompt": p} for p in ("a b ", "c\u2028d", "\te")]
        assert [row.row for row in rows] == [1, 4, 5]

    def test_a_line_that_is_no_text(self, tmp_path: Path) -> None:
        good, bad, last = rows_of(tmp_path / "a.txt", b"a\nb\xff\nc\n")
        assert [good.columns, last.columns] == [{"prompt": "a"}, {"prompt": "c"}]
        assert bad.columns is None
        assert bad.error == f"{tmp_path}/a.txt: line 2: not UTF-8 (invalid start byte at byte 1)"
        assert bad.text == "b\ufffd"


class TestCsv:
    def test_quotes_lines_and_empty_values(self, tmp_path: Path) -> None:
        content = b'\xef\xbb\xbfid,prompt,note\r\n1,"a, ""b""\nc",\r\n\r\n2,d,"e"\r\n3,f,g'
        rows = rows_of(tmp_path / "a.csv", content)
        assert [row.columns for row in rows] == [
            {"id": "1", "prompt": 'a, "b"\nc', "note": None},
            {"id": "2", "prompt": "d", "note": "e"},
            {"id": "3", "prompt": "f", "note": "g"},
        ]
        assert [row.row for row in rows] == [2, 5, 6]  # Where each begins.
        assert rows[1].where == locate(str(tmp_path / "a.csv"), 5)

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            (b"1", "bad CSV (1 fields, the header has 2)"),
            (b"1,2,3", "bad CSV (3 fields, the header has 2)"),
            (b"1,\xff", "not UTF-8"),
            (b'1,"a"b', "bad CSV ("),
        ],
    )
    def test_a_bad_row_is_one_row(self, tmp_path: Path, line: bytes, reason: str) -> None:
        content = b"id,prompt\n0,a\n" + line + b"\n2,c\n"
        first, bad, last = rows_of(tmp_path / "a.csv", content)
        assert first.columns == {"id": "0", "prompt": "a"}
        assert last.columns == {"id": "2", "prompt": "c"}
        assert bad.columns is None
        assert bad.row == 3
        assert f"{tmp_path}/a.csv: line 3: {reason}" in str(bad.error)
        if b'"' not in line:
            assert bad.text == line.decode(errors="replace")

    def test_a_quote_that_never_ends_is_a_bad_row(self, tmp_path: Path) -> None:
        good, bad = rows_of(tmp_path / "a.csv", b'prompt\na\n"b\nc\nd\n')
        assert good.columns == {"prompt": "a"}
        assert (bad.columns, bad.row) == (None, 3)

    def test_long_fields(self, tmp_path: Path) -> None:
        text = "x" * 300_000
        assert columns_of(tmp_path / "a.csv", f"prompt\n{text}\n".encode()) == [{"prompt": text}]

    def test_a_header_that_names_a_column_twice(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="header names the column 'a' twice"):
            rows_of(tmp_path / "a.csv", b"a,b,a\n1,2,3\n")

    @pytest.mark.parametrize("content", [b"", b"\n\n", b"prompt\n", b"prompt"])
    def test_no_rows(self, tmp_path: Path, content: bytes) -> None:
        assert rows_of(tmp_path / "a.csv", content) == []
