"""What an input names: files, folders, globs, hub data sets; nothing twice, nothing silently left out."""

from pathlib import Path

import pytest

from pipeline.errors import InputError
from pipeline.sources import Sources, check_source, column_types, find_sources, locate, read_rows


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"prompt": "a"}\n', encoding="utf-8")
    return folder


def found(*given: str | Path) -> list[str]:
    return list(find_sources([str(name) for name in given]).uris)


def test_a_folder_is_its_files_by_name_at_any_depth(tmp_path: Path) -> None:
    make(tmp_path, "b.jsonl", "a.csv", "deep/er/c.parquet", "_SUCCESS", "notes.md", ".d.jsonl")
    make(tmp_path, ".hidden/e.jsonl")
    names = [str(tmp_path / name) for name in ("a.csv", "b.jsonl", "deep/er/c.parquet")]
    ignored = tuple(str(tmp_path / name) for name in ("_SUCCESS", "notes.md"))
    for given in (str(tmp_path), f"{tmp_path}/", f"file://{tmp_path}"):
        assert find_sources([given]) == Sources(tuple(names), ignored)


def test_a_glob_is_the_files_it_matches(tmp_path: Path) -> None:
    make(tmp_path, "b2.jsonl", "b1.jsonl", "deep/b3.jsonl", "b.txt")
    assert found(tmp_path / "b*.jsonl") == [str(tmp_path / f"b{n}.jsonl") for n in (1, 2)]
    assert found(tmp_path / "b?.jsonl") == [str(tmp_path / f"b{n}.jsonl") for n in (1, 2)]
    assert found(tmp_path / "b[2].jsonl") == [str(tmp_path / "b2.jsonl")]
    deep = [str(tmp_path / name) for name in ("b1.jsonl", "b2.jsonl", "deep/b3.jsonl")]
    assert found(tmp_path / "**" / "*.jsonl") == deep
    with pytest.raises(InputError, match="no file has such a name"):
        found(tmp_path / "c*.jsonl")
    with pytest.raises(InputError, match=r"b\.txt.*named twice"):
        found(tmp_path / "b*", tmp_path / "b.txt")


def test_a_file_may_be_called_like_a_glob(tmp_path: Path) -> None:
    make(tmp_path, "b[1].jsonl", "b1.jsonl")
    assert found(tmp_path / "b[1].jsonl") == [str(tmp_path / "b[1].jsonl")]


def test_files_keep_the_order_they_are_named_in(tmp_path: Path) -> None:
    make(tmp_path, "b.jsonl", "a.jsonl", "c/d.jsonl")
    given = [tmp_path / "b.jsonl", tmp_path / "c", tmp_path / "a.jsonl"]
    assert found(*given) == [str(tmp_path / name) for name in ("b.jsonl", "c/d.jsonl", "a.jsonl")]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("missing.jsonl", "no such file"),
        ("missing", "unknown format"),
        ("a.docx", "unknown format"),
        ("empty", "no file in this folder has a known format"),
        ("notes", "no file in this folder has a known format"),
        ("s3:/", "unknown format"),
        ("http://127.0.0.1:9/data", "unknown format"),
        ("hf://", "expected hf://"),
        ("hf://a:b:c:d", "expected hf://"),
        ("hf://a::train", "expected hf://"),
    ],
)
def test_what_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, reason: str
) -> None:
    make(tmp_path, "a.docx", "notes/README.md")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"^{given}.*{reason}"):
        find_sources([given])


class TestHub:
    """Data sets through `datasets`: here from a folder, which takes the same way."""

    def test_rows_and_types(self, tmp_path: Path) -> None:
        lines = "".join(f'{{"prompt": "p{i}", "n": {i}}}\n' for i in range(3))
        (tmp_path / "train.jsonl").write_text(lines, encoding="utf-8")
        uri = f"hf://{tmp_path}"
        check_source(uri)
        assert find_sources([uri]).uris == (uri,)
        rows = list(read_rows(uri))
        assert [row.columns for row in rows] == [{"prompt": f"p{i}", "n": i} for i in range(3)]
        assert [row.where for row in rows] == [f"{uri}: row {i}" for i in (1, 2, 3)]
        assert locate(uri, 2) == rows[1].where
        assert column_types(f"{uri}:train") == column_types(uri)

    @pytest.mark.parametrize(
        ("what", "reason"), [("test", "cannot be opened"), ("x:train", "hf://")]
    )
    def test_what_is_not_there(self, tmp_path: Path, what: str, reason: str) -> None:
        (tmp_path / "train.jsonl").write_text('{"prompt": "p"}\n', encoding="utf-8")
        with pytest.raises(InputError, match=reason):
            list(read_rows(f"hf://{tmp_path}:{what}"))

    def test_a_damaged_file(self, tmp_path: Path) -> None:
        (tmp_path / "train.jsonl").write_text('{"prompt": "p"}\n{"prom', encoding="utf-8")
        with pytest.raises(InputError, match="hf://"):
            list(read_rows(f"hf://{tmp_path}"))
