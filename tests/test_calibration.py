"""Calibration texts: the shipped set, users' files, and every way in which a file can disappoint."""

import gzip
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.admission import load_tokenizer
from pipeline.calibration import DEFAULT_TEXTS, read_calibration
from pipeline.errors import InputError
from quant.config import QuantConfig

ROWS = [
    {"prompt": "one"},
    {"messages": [{"role": "user", "content": "two"}, {"role": "assistant", "content": "2"}]},
    {"prompt": "three", "answer": "3", "sampling_params": {"max_tokens": 5}},
    {"prompt_token_ids": [5, 6, 7, 8]},
]
# As the chat template of the tests writes them.
TEXTS = [
    "one",
    "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|im_start|>assistant\n",
    "three",
]


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Any:
    return load_tokenizer(tiny_checkpoint)


@pytest.fixture(scope="module")
def plain_tokenizer(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tokenizer of a model that has no chat template."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    shutil.copytree(tiny_checkpoint, folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    del settings["chat_template"]
    path.write_text(json.dumps(settings), encoding="utf-8")
    return load_tokenizer(folder)


def write(path: Path, rows: Sequence[object]) -> str:
    """Rows as lines; strings as they stand."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def shipped_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in DEFAULT_TEXTS.read_text(encoding="utf-8").splitlines()]


def all_of_it(max_tokens: int) -> QuantConfig:
    """Calibration on every row of the shipped set."""
    return QuantConfig(num_calibration_samples=128, max_calibration_tokens=max_tokens)


def test_the_shipped_set() -> None:
    rows = shipped_rows()
    assert len(rows) == 128 >= QuantConfig().num_calibration_samples
    assert len({row["id"] for row in rows}) == 128
    assert len({json.dumps(row["messages"]) for row in rows}) == 128
    for row in rows:
        assert row.keys() == {"id", "messages"}, row["id"]
        roles = [message["role"] for message in row["messages"]]
        assert roles[-1] == "assistant", row["id"]
        turns = roles[roles[0] == "system" :]
        assert turns == ["user", "assistant"] * (len(turns) // 2), row["id"]
        assert all(message["content"].strip() for message in row["messages"]), row["id"]


def test_the_shipped_set_is_the_default(tokenizer: Any) -> None:
    texts = read_calibration(all_of_it(128), tokenizer)
    rows = shipped_rows()
    assert len(texts) == 128
    for row, text in zip(rows, texts, strict=True):
        content = "".join(
            f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in row["messages"]
        )
        decoded = tokenizer.decode(text).rstrip("\ufffd")  # A letter may be cut, too.
        assert f"{content}<|im_start|>assistant\n".startswith(decoded), row["id"]
        assert 20 < len(text) <= 128


@pytest.mark.parametrize("recipe", ["smoothquant", "m2"])
def test_recipes_that_calibrate(tokenizer: Any, recipe: str) -> None:
    config = QuantConfig(recipe=recipe, num_calibration_samples=3)
    assert len(read_calibration(config, tokenizer)) == 3


@pytest.mark.parametrize(
    "recipe",
    [
        {"recipe": "rtn"},
        {"precision": "bf16"},
        {"precision": "float32", "recipe": "m2"},
        {"precision": "float64", "target_agreement": 0.9},
    ],
)
def test_nothing_is_read_without_need(tokenizer: Any, recipe: dict[str, Any]) -> None:
    config = QuantConfig(calibration="no such file", **recipe)
    assert read_calibration(config, tokenizer) == []


@pytest.mark.parametrize("choice", [{"target_agreement": 0.9}, {"max_float_bytes": 0}])
def test_choosing_float_linears_needs_texts(
    tokenizer: Any, choice: dict[str, Any], tmp_path: Path
) -> None:
    uri = write(tmp_path / "a.jsonl", ROWS)
    config = QuantConfig(recipe="rtn", calibration=uri, num_calibration_samples=2, **choice)
    assert len(read_calibration(config, tokenizer)) == 2


def read(uri: str, tokenizer: Any, count: int, max_tokens: int = 128) -> list[list[int]]:
    config = QuantConfig(
        calibration=uri, num_calibration_samples=count, max_calibration_tokens=max_tokens
    )
    return read_calibration(config, tokenizer)


def write_as(kind: str, folder: Path) -> str:
    """ROWS in one of the formats."""
    path = folder / f"texts.{kind}"
    if kind == "parquet":
        names = {name for row in ROWS for name in row}
        pq.write_table(pa.table({n: [row.get(n) for row in ROWS] for n in names}), path)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(Path(write(folder / "raw.jsonl", ROWS)).read_bytes()))
    else:
        write(path, ROWS)
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_the_texts_are_what_the_model_would_read(tokenizer: Any, kind: str, tmp_path: Path) -> None:
    texts = read(write_as(kind, tmp_path), tokenizer, 4)
    assert [tokenizer.decode(text) for text in texts[:3]] == TEXTS
    assert len(texts[0]) == 3
    assert texts[3] == [5, 6, 7, 8]
    assert all(type(token) is int for text in texts for token in text)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_first_rows_are_used(tokenizer: Any, count: int, tmp_path: Path) -> None:
    uri = write(tmp_path / "a.jsonl", ROWS)
    assert read(uri, tokenizer, count) == read(uri, tokenizer, 4)[:count]


@pytest.mark.parametrize("max_tokens", [2, 4, 9, 128])
def test_long_texts_are_cut(tokenizer: Any, max_tokens: int, tmp_path: Path) -> None:
    """Also beyond what the model could read (256 tokens): such a row is no error here."""
    content = "abcdefghij" * 100
    uri = write(tmp_path / "a.jsonl", [{"prompt": content}, {"prompt": "xyz"}])
    long, short = read(uri, tokenizer, 2, max_tokens)
    assert tokenizer.decode(long) == content[:max_tokens]
    assert tokenizer.decode(short) == "xyz"[:max_tokens]


def test_what_comes_behind_the_last_text_is_not_read(tokenizer: Any, tmp_path: Path) -> None:
    uri = write(tmp_path / "a.jsonl", [*ROWS, "{not JSON"])
    assert len(read(uri, tokenizer, 4)) == 4


def refusal(uri: str, tokenizer: Any, count: int = 2) -> str:
    with pytest.raises(InputError) as caught:
        read(uri, tokenizer, count)
    return str(caught.value)


def test_too_few_rows(tokenizer: Any, tmp_path: Path) -> None:
    uri = write(tmp_path / "a.jsonl", ROWS)
    message = refusal(uri, tokenizer, 5)
    assert message.startswith(f"{uri}: holds 4 calibration texts, and 5 are asked for")
    assert "num_calibration_samples" in message


def test_texts_that_are_all_system_prompt(tokenizer: Any, tmp_path: Path) -> None:
    """Nothing but the instructions that all rows share would be left of them."""
    system = {"role": "system", "content": "Answer in verse. " * 8}
    rows = [{"messages": [system, {"role": "user", "content": c}]} for c in ("why?", "how?")]
    uri = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(InputError) as caught:
        read(uri, tokenizer, 2, 64)
    assert str(caught.value).startswith(f"{uri}: the first 64 tokens of all texts are the same")
    assert "max_calibration_tokens" in str(caught.value)
    assert len(read(uri, tokenizer, 2, 256)) == 2
    assert len(read(uri, tokenizer, 1, 64)) == 1


def test_the_shipped_set_has_its_end(tokenizer: Any) -> None:
    with pytest.raises(InputError) as caught:
        read_calibration(QuantConfig(num_calibration_samples=129), tokenizer)
    assert str(caught.value).startswith(f"{DEFAULT_TEXTS}: holds 128 calibration texts, and 129")


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_an_empty_file(tokenizer: Any, content: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content, encoding="utf-8")
    assert refusal(str(path), tokenizer, 1).startswith(f"{path}: holds 0 calibration texts")


def test_texts_of_one_token(tokenizer: Any, tmp_path: Path) -> None:
    """They say nothing: there is no next token to predict."""
    uri = write(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "cd"}])
    assert uri in refusal(uri, tokenizer, 2)
    assert len(read(uri, tokenizer, 3)) == 3


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "cut off', "bad JSON"),
        ('["prompt"]', "not a JSON object"),
        ({"text": "no prompt"}, "no prompt, messages or prompt_token_ids"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "both"),
        ({"prompt": ""}, "empty"),
        ({"prompt": 5}, "prompt is an int"),
        ({"prompt_token_ids": [1, 300]}, "300"),
        ({"messages": [{"role": "narrator", "content": "b"}]}, "narrator"),
    ],
)
def test_a_bad_row_is_named(tokenizer: Any, line: object, reason: str, tmp_path: Path) -> None:
    uri = write(tmp_path / "a.jsonl", [ROWS[0], line, ROWS[2]])
    message = refusal(uri, tokenizer)
    assert message.startswith(f"{uri}: line 2: ")
    assert reason in message
    assert message.count(uri) == 1
    assert read(uri, tokenizer, 1)


def test_a_bad_row_of_a_parquet_file_is_named(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a", None]}), path)
    assert refusal(str(path), tokenizer).startswith(f"{path}: row 2: ")


@pytest.mark.parametrize("name", ["none.jsonl", "none.parquet", "texts.csv", "folder.jsonl"])
def test_a_file_that_is_none(tokenizer: Any, name: str, tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("prompt\na\n", encoding="utf-8")
    (tmp_path / "folder.jsonl").mkdir()
    message = refusal(str(tmp_path / name), tokenizer)
    assert message.startswith(f"{tmp_path / name}: ")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet"])
def test_a_damaged_file(tokenizer: Any, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x1f\x8b\x08 no such thing")
    assert refusal(str(tmp_path / name), tokenizer).startswith(f"{tmp_path / name}: ")


def test_a_model_without_a_chat_template(plain_tokenizer: Any, tmp_path: Path) -> None:
    """A dialogue is what was said, one turn below the other."""
    assert plain_tokenizer.chat_template is None
    texts = read(write(tmp_path / "a.jsonl", ROWS), plain_tokenizer, 4)
    assert [plain_tokenizer.decode(text) for text in texts[:3]] == ["one", "two\n2", "three"]
    assert texts[3] == [5, 6, 7, 8]


def test_a_model_without_a_chat_template_and_the_shipped_set(plain_tokenizer: Any) -> None:
    texts = read_calibration(all_of_it(20), plain_tokenizer)
    assert len(texts) == 128
    first = "\n".join(message["content"] for message in shipped_rows()[0]["messages"])
    assert plain_tokenizer.decode(texts[0]) == first.encode()[:20].decode()


def test_a_bad_row_without_a_chat_template_is_named(plain_tokenizer: Any, tmp_path: Path) -> None:
    uri = write(tmp_path / "a.jsonl", [ROWS[0], {"messages": []}])
    assert refusal(uri, plain_tokenizer).startswith(f"{uri}: line 2: ")
    uri = write(tmp_path / "b.jsonl", [ROWS[0], "{not JSON"])
    assert refusal(uri, plain_tokenizer).startswith(f"{uri}: line 2: bad JSON")
