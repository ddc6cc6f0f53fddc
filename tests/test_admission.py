"""From a raw row to token ids or to a reason: every row gets one, and no row harms another."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipeline.admission import Admission, AdmittedRow, load_tokenizer
from pipeline.errors import InputError
from pipeline.requests import build_requests
from pipeline.sources import RawRow, read_rows
from workers.config import SamplingParams

WHERE = "in/a.jsonl: line 7"
HELLO = list(b"hello")
MAX_LEN = 40
# The tiny tokenizer numbers bytes 0 to 255 by its own alphabet; see `ids_of`.
START, END = 257, 258


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Any:
    return load_tokenizer(tiny_checkpoint)


@pytest.fixture(scope="module")
def admission(tokenizer: Any) -> Admission:
    return Admission(tokenizer, SamplingParams(max_tokens=8), MAX_LEN, len(tokenizer))


def ids_of(text: str) -> list[int]:
    """The tiny tokenizer by hand: GPT-2's byte alphabet, sorted by code point."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    # GPT-2 moves the n-th unprintable byte to code point 256 + n, behind all printable ones.
    order = printable + others
    return [order.index(byte) for byte in text.encode()]


def admit(admission: Admission, columns: dict[str, Any]) -> AdmittedRow:
    admitted = admission.admit(RawRow(6, WHERE, columns), "a.jsonl")
    assert (admitted.prompt_token_ids is None) == (admitted.error is not None)
    assert (admitted.error is None) == (admitted.error_type is None)
    return admitted


def test_a_prompt(admission: Admission) -> None:
    row = admit(admission, {"prompt": "hé\n", "topic": "x", "tags": [1], "none": None})
    assert (row.id, row.source, row.row) == ("a.jsonl:6", "a.jsonl", 6)
    assert row.prompt_token_ids == ids_of("hé\n")
    assert (row.prompt, row.messages, row.sampling_params) == ("hé\n", None, None)
    assert row.carried == {"topic": "x", "tags": [1], "none": None}
    assert row.max_total_tokens == 4 + 8


def test_messages_go_through_the_chat_template(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    roomy = Admission(tokenizer, SamplingParams(max_tokens=8), 200, len(tokenizer))
    row = admit(roomy, {"id": "m", "messages": messages})
    assert row.error is None
    assert (row.messages, row.prompt) == (messages, None)
    assert row.prompt_token_ids == [
        *(START, *ids_of("system\ns"), END, *ids_of("\n")),
        *(START, *ids_of("user\nhi"), END, *ids_of("\n")),
        *(START, *ids_of("assistant\n")),  # The generation prompt.
    ]


def test_token_ids_are_taken_as_they_are(admission: Admission) -> None:
    row = admit(admission, {"prompt_token_ids": [0, 258, 258, 5]})
    assert row.prompt_token_ids == [0, 258, 258, 5]
    assert row.max_total_tokens == 12


@pytest.mark.parametrize(("given_id", "expected"), [("x", "x"), (7, "7"), (0, "0"), ("é:1", "é:1")])
def test_ids(admission: Admission, given_id: Any, expected: str) -> None:
    assert admit(admission, {"id": given_id, "prompt": "a"}).id == expected


def test_an_id_that_is_null_is_made(admission: Admission) -> None:
    assert admit(admission, {"id": None, "prompt": "a"}).id == "a.jsonl:6"


USER = {"role": "user", "content": "a"}

# name -> (columns, the error's type, words of its message)
REFUSED: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "nothing": ({}, "NoPrompt", ("prompt", "messages")),
    "nothing of ours": ({"text": "a"}, "NoPrompt", ("prompt",)),
    "all null": ({"prompt": None, "messages": None}, "NoPrompt", ("prompt",)),
    "two prompts": (
        {"prompt": "a", "messages": [USER]},
        "AmbiguousPrompt",
        ("prompt", "messages"),
    ),
    "three prompts": (
        {"prompt": "a", "messages": [USER], "prompt_token_ids": [1]},
        "AmbiguousPrompt",
        ("prompt_token_ids",),
    ),
    "empty prompt": ({"prompt": ""}, "InvalidPrompt", ("empty",)),
    "prompt a number": ({"prompt": 5}, "InvalidPrompt", ("prompt", "int")),
    "prompt a list": ({"prompt": ["a"]}, "InvalidPrompt", ("prompt", "list")),
    "prompt false": ({"prompt": False}, "InvalidPrompt", ("prompt", "bool")),
    "no messages": ({"messages": []}, "InvalidMessages", ("messages",)),
    "messages a string": ({"messages": "hi"}, "InvalidMessages", ("messages",)),
    "messages one object": ({"messages": USER}, "InvalidMessages", ("messages",)),
    "a message a string": ({"messages": [USER, "hi"]}, "InvalidMessages", ("messages[1]",)),
    "no role": ({"messages": [{"content": "a"}]}, "InvalidMessages", ("messages[0].role",)),
    "unknown role": (
        {"messages": [{"role": "robot", "content": "a"}]},
        "InvalidMessages",
        ("messages[0].role", "robot"),
    ),
    "role a list": ({"messages": [{"role": [], "content": "a"}]}, "InvalidMessages", ("role",)),
    "no content": ({"messages": [{"role": "user"}]}, "InvalidMessages", ("messages[0].content",)),
    "content null": (
        {"messages": [USER, {"role": "user", "content": None}]},
        "InvalidMessages",
        ("messages[1].content", "null"),
    ),
    "content in parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        "InvalidMessages",
        ("messages[0].content", "list"),
    ),
    "a key not understood": (
        {"messages": [USER | {"tool_calls": [1]}]},
        "InvalidMessages",
        ("tool_calls",),
    ),
    "id a list": ({"id": ["a"], "prompt": "a"}, "InvalidId", ("id", "list")),
    "id a fraction": ({"id": 1.5, "prompt": "a"}, "InvalidId", ("id", "float")),
    "id true": ({"id": True, "prompt": "a"}, "InvalidId", ("id", "bool")),
    "id empty": ({"id": "", "prompt": "a"}, "InvalidId", ("id", "empty")),
    "no token ids": ({"prompt_token_ids": []}, "InvalidPrompt", ("empty",)),
    "token ids a string": ({"prompt_token_ids": "1 2"}, "InvalidPrompt", ("prompt_token_ids",)),
    "a token id a fraction": (
        {"prompt_token_ids": [1, 2.0]},
        "InvalidPrompt",
        ("prompt_token_ids",),
    ),
    "a token id true": ({"prompt_token_ids": [True]}, "InvalidPrompt", ("prompt_token_ids",)),
    "a token id null": ({"prompt_token_ids": [1, None]}, "InvalidPrompt", ("prompt_token_ids",)),
    "a negative token id": ({"prompt_token_ids": [1, -1]}, "InvalidPrompt", ("-1", "259")),
    "beyond the vocabulary": ({"prompt_token_ids": [258, 259]}, "InvalidPrompt", ("259",)),
    "a huge token id": ({"prompt_token_ids": [2**70]}, "InvalidPrompt", (str(2**70),)),
    "as long as all": ({"prompt": "x" * MAX_LEN}, "PromptTooLong", (str(MAX_LEN),)),
    "much too long": ({"prompt": "x" * 5000}, "PromptTooLong", ("5000", str(MAX_LEN))),
    "long messages": (
        {"messages": [{"role": "user", "content": "x" * 99}]},
        "PromptTooLong",
        (str(MAX_LEN),),
    ),
    "long token ids": ({"prompt_token_ids": [1] * 41}, "PromptTooLong", ("41", "40")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_rows_say_why_and_where(admission: Admission, name: str) -> None:
    columns, error_type, words = REFUSED[name]
    row = admit(admission, columns | {"topic": "kept"})
    assert row.error_type == error_type
    assert row.error is not None
    assert row.error.startswith(f"{WHERE}: ")
    assert row.error.count(WHERE) == 1
    for word in words:
        assert word in row.error
    assert row.carried.get("topic") == "kept"
    assert row.max_total_tokens == 0


def test_stop_tokens_outside_the_vocabulary_are_refused(
    admission: Admission, tokenizer: Any
) -> None:
    row = admit(admission, {"prompt": "a", "sampling_params": {"stop_token_ids": [5, 999_999]}})
    assert row.error_type == "InvalidSamplingParams"
    assert "sampling_params.stop_token_ids: 999999 is not in the vocabulary" in str(row.error)
    assert WHERE in str(row.error)
    params = SamplingParams(stop_token_ids=(10**6,))
    with pytest.raises(
        InputError, match=r"^sampling\.stop_token_ids: 1000000 is not in the vocabulary"
    ):
        Admission(tokenizer, params, MAX_LEN, len(tokenizer))


def test_an_unreadable_line_is_located_once(admission: Admission) -> None:
    raw = RawRow(6, WHERE, None, f"{WHERE}: bad JSON (...)")
    row = admission.admit(raw, "a.jsonl")
    assert (row.id, row.error, row.error_type) == (
        "a.jsonl:6",
        f"{WHERE}: bad JSON (...)",
        "BadRow",
    )
    assert row.prompt_token_ids is None


def test_one_token_short_of_the_limit_runs(admission: Admission) -> None:
    row = admit(admission, {"prompt": "x" * (MAX_LEN - 1)})
    assert row.error is None
    assert row.max_total_tokens == MAX_LEN


# name -> (sampling_params, the key that must be named)
BAD_PARAMS: dict[str, tuple[Any, str]] = {
    "unknown key": ({"temprature": 1}, "sampling_params.temprature"),
    "another's key": ({"best_of": 2}, "sampling_params.best_of"),
    "negative temperature": ({"temperature": -0.1}, "sampling_params.temperature"),
    "top_p 0": ({"top_p": 0}, "sampling_params.top_p"),
    "top_k below -1": ({"top_k": -2}, "sampling_params.top_k"),
    "max_tokens 0": ({"max_tokens": 0}, "sampling_params.max_tokens"),
    "max_tokens a fraction": ({"max_tokens": 1.5}, "sampling_params.max_tokens"),
    "max_tokens a string": ({"max_tokens": "5"}, "sampling_params.max_tokens"),
    "temperature a string": ({"temperature": "0"}, "sampling_params.temperature"),
    "ignore_eos a number": ({"ignore_eos": 1}, "sampling_params.ignore_eos"),
    "ignore_eos a string": ({"ignore_eos": "no"}, "sampling_params.ignore_eos"),
    "stop a number": ({"stop": 5}, "sampling_params.stop"),
    "stop with an empty string": ({"stop": ["a", ""]}, "sampling_params.stop"),
    "stop empty": ({"stop": ""}, "sampling_params.stop"),
    "stop_token_ids negative": ({"stop_token_ids": [-1]}, "sampling_params.stop_token_ids"),
    "seed negative": ({"seed": -1}, "sampling_params.seed"),
    "seed too large": ({"seed": 2**63}, "sampling_params.seed"),
    "n 0": ({"n": 0}, "sampling_params.n"),
    "penalty out of range": ({"presence_penalty": 3}, "sampling_params.presence_penalty"),
    "min above max": ({"min_tokens": 9}, "min_tokens"),
    "a list": ([1], "sampling_params"),
    "a string": ("temperature=1", "sampling_params"),
    "infinite": ({"temperature": float("inf")}, "sampling_params"),
    "bytes": ({"stop": b"x"}, "sampling_params"),
}


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_bad_parameters_of_a_row(admission: Admission, name: str) -> None:
    params, named = BAD_PARAMS[name]
    row = admit(admission, {"id": "x", "prompt": "a", "sampling_params": params})
    assert row.error_type == "InvalidSamplingParams"
    assert row.error is not None
    assert row.error.startswith(f"{WHERE}: ")
    assert named in row.error
    assert (row.id, row.prompt) == ("x", "a")


def test_parameters_of_a_row_are_merged_over_the_runs(admission: Admission) -> None:
    params = {"temperature": 1, "stop": "END", "n": 2, "top_k": None}
    row = admit(admission, {"prompt": "abc", "sampling_params": params})
    assert row.error is None
    plan_row = {"id": row.id, "prompt_token_ids": row.prompt_token_ids, "prompt_digest": None}
    first, second = build_requests(
        plan_row | {"sampling_params": row.sampling_params},
        SamplingParams(max_tokens=8, top_k=7),
        0,
    )
    assert first.params == SamplingParams(temperature=1, stop=("END",), n=2, max_tokens=8, top_k=7)
    assert (first.sample_idx, second.sample_idx) == (0, 1)
    assert first.seed == second.seed
    longer = admit(admission, {"prompt": "abc", "sampling_params": {"max_tokens": 20}})
    assert longer.max_total_tokens == 23


def test_seeds() -> None:
    def seeds(
        row_id: str, run_seed: int, params: str | None = None, digest: bytes | None = None
    ) -> list[int]:
        row = {"id": row_id, "prompt_token_ids": [1], "sampling_params": params}
        row["prompt_digest"] = digest
        return [request.seed for request in build_requests(row, SamplingParams(), run_seed)]

    # printf 0:a | sha256sum: the first 8 bytes, less the last bit.
    assert seeds("a", 0) == [0x9DF3C5FAB8EF8FE7 >> 1]
    assert seeds("a", 0) != seeds("b", 0) != seeds("a", 1)
    assert seeds("a", 5, '{"seed": 3, "n": 2}') == [3, 3]
    assert seeds("a", 0, digest=b"one") == seeds("b", 0, digest=b"one") != seeds("a", 0)
    assert seeds("a", 0, digest=b"one") != seeds("a", 0, digest=b"two")
    assert seeds("a", 5, '{"seed": 3}', b"one") == [3]
    assert all(0 <= seed < 2**63 for i in range(200) for seed in seeds(str(i), i))


OPENAI = {
    "custom_id": "request-1",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {
        "model": "any",
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 5,
        "temperature": 0.5,
    },
}


def test_an_openai_batch_line(admission: Admission) -> None:
    row = admit(admission, OPENAI | {"note": "kept"})
    assert row.error is None
    assert (row.id, row.carried) == ("request-1", {"note": "kept"})
    assert row.messages == [{"role": "user", "content": "hi"}]
    assert json.loads(row.sampling_params or "") == {"max_tokens": 5, "temperature": 0.5}


def test_an_openai_completion_line(admission: Admission) -> None:
    body = {"model": "any", "prompt": "hi", "max_tokens": 3}
    row = admit(admission, OPENAI | {"url": "/v1/completions", "body": body})
    assert (row.prompt, row.prompt_token_ids) == ("hi", ids_of("hi"))
    assert json.loads(row.sampling_params or "") == {"max_tokens": 3}


@pytest.mark.parametrize(
    ("body", "error_type", "word"),
    [
        ({"messages": [USER], "stream": True}, "InvalidSamplingParams", "stream"),
        ({"messages": [USER], "tools": []}, "InvalidSamplingParams", "tools"),
        ({"model": "any"}, "NoPrompt", "messages"),
    ],
)
def test_a_bad_openai_batch_line(
    admission: Admission, body: dict[str, Any], error_type: str, word: str
) -> None:
    row = admit(admission, OPENAI | {"body": body})
    assert (row.id, row.error_type) == ("request-1", error_type)
    assert word in (row.error or "")


def test_a_struct_from_parquet_is_full_of_nulls(admission: Admission, tmp_path: Path) -> None:
    params = [{"temperature": 0.5}, {"max_tokens": 3, "stop": ["x"]}, None]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b", "c"], "sampling_params": params}), path)
    rows = [admission.admit(raw, "a.parquet") for raw in read_rows(str(path))]
    assert [row.error for row in rows] == [None, None, None]
    kept = [row.sampling_params and json.loads(row.sampling_params) for row in rows]
    assert kept == [{"temperature": 0.5}, {"max_tokens": 3, "stop": ["x"]}, None]
    assert all(row.carried == {} for row in rows)


def test_messages_from_parquet(admission: Admission, tmp_path: Path) -> None:
    messages = [[USER], [USER | {"name": "n"}], [USER, {"role": "robot", "content": "b"}]]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [3, 1, 2], "messages": messages}), path)
    rows = [admission.admit(raw, "a.parquet") for raw in read_rows(str(path))]
    assert [row.id for row in rows] == ["3", "1", "2"]
    assert rows[0].messages == [USER]
    assert [row.error_type for row in rows] == [None, "InvalidMessages", "InvalidMessages"]
    assert f"{path}: row 3: messages[1].role" in (rows[2].error or "")


def test_a_model_without_a_chat_template(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((tiny_checkpoint / name).read_bytes())
    settings_file = tmp_path / "tokenizer_config.json"
    settings_of = json.loads(settings_file.read_text(encoding="utf-8"))
    del settings_of["chat_template"]
    settings_file.write_text(json.dumps(settings_of), encoding="utf-8")
    admission = Admission(load_tokenizer(tmp_path), SamplingParams(), 99, 300)
    assert admit(admission, {"messages": [USER]}).error_type == "NoChatTemplate"
    assert admit(admission, {"prompt": "a"}).prompt_token_ids == ids_of("a")


def test_a_template_that_refuses_a_conversation(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((tiny_checkpoint / name).read_bytes())
    settings_file = tmp_path / "tokenizer_config.json"
    settings_of = json.loads(settings_file.read_text(encoding="utf-8"))
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}hi"
    settings_file.write_text(json.dumps(settings_of | {"chat_template": template}), "utf-8")
    admission = Admission(load_tokenizer(tmp_path), SamplingParams(), 99, 300)
    row = admit(admission, {"messages": [{"role": "system", "content": "s"}]})
    assert (row.error_type, "user first" in (row.error or "")) == ("TemplateFailed", True)
    assert admit(admission, {"messages": [USER]}).prompt_token_ids == ids_of("hi")


def test_special_tokens_in_a_prompt_are_the_models_own(admission: Admission) -> None:
    row = admit(admission, {"prompt": "<|im_start|>a"})
    assert row.prompt_token_ids == [START, *ids_of("a")]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(raised.value)


_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(codec="utf-8"), max_size=12)
    | st.sampled_from(["user", "assistant", "a" * 60])
)
_JSON = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "temperature", "max_tokens", "stop", "x", ""]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
_NAMES = ["id", "prompt", "messages", "prompt_token_ids", "sampling_params", "topic", "body"]
_ROWS = st.dictionaries(
    st.sampled_from([*_NAMES, "custom_id", "method", "url"]) | st.text(max_size=3),
    _JSON,
    max_size=6,
)


@settings(
    max_examples=150,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(columns=_ROWS)
@example(columns={"custom_id": [], "method": 1, "url": None, "body": {}})
@example(columns={"custom_id": None, "method": 1, "url": None, "body": {"messages": [[]]}})
@example(columns={"prompt": "a", "sampling_params": {"seed": 10**400, "temperature": 10**400}})
def test_admission_never_raises(admission: Admission, columns: dict[str, Any]) -> None:
    row = admit(admission, columns)
    if row.error is not None:
        assert row.error.startswith(WHERE)
        return
    assert row.id
    assert row.prompt_token_ids
    assert len(row.prompt_token_ids) < MAX_LEN
    assert all(0 <= token < 259 for token in row.prompt_token_ids)
    assert len(row.prompt_token_ids) < row.max_total_tokens <= MAX_LEN
    plan_row = {"id": row.id, "prompt_token_ids": row.prompt_token_ids}
    requests = build_requests(
        plan_row | {"sampling_params": row.sampling_params}, SamplingParams(max_tokens=8), 0
    )
    assert len(requests) == requests[0].params.n
