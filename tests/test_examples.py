"""The example prompts are rows that the pipeline can read."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

PROMPTS = Path(__file__).parents[1] / "examples" / "prompts.jsonl"
TASKS = {"chat", "code", "summarize", "arithmetic", "extract", "rewrite"}
COLUMNS = {"id", "task", "prompt", "messages", "sampling_params"}
SAMPLING_KEYS = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "seed",
    "n",
    "logprobs",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]


def test_there_are_enough_rows_of_every_task(rows: list[dict[str, Any]]) -> None:
    assert len(rows) >= 64
    per_task = Counter(row["task"] for row in rows)
    assert per_task.keys() == TASKS
    assert min(per_task.values()) >= 10, per_task


def test_ids_are_unique_and_columns_known(rows: list[dict[str, Any]]) -> None:
    ids = [row["id"] for row in rows]
    assert all(isinstance(id_, str) and id_ for id_ in ids)
    assert len(set(ids)) == len(ids)
    for row in rows:
        assert row.keys() <= COLUMNS, row["id"]


def test_every_row_has_exactly_one_prompt_or_messages(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert ("prompt" in row) != ("messages" in row), row["id"]
    assert any("prompt" in row for row in rows)
    assert any("messages" in row for row in rows)


def test_prompts_and_messages_are_well_formed(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if "prompt" in row:
            assert isinstance(row["prompt"], str), row["id"]
            assert row["prompt"].strip(), row["id"]
            continue
        roles = [message["role"] for message in row["messages"]]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2) + ["user"], row["id"]
        for message in row["messages"]:
            assert message.keys() == {"role", "content"}, row["id"]
            assert isinstance(message["content"], str), row["id"]
            assert message["content"].strip(), row["id"]


def test_sampling_params_use_known_names_only(rows: list[dict[str, Any]]) -> None:
    own = [row for row in rows if "sampling_params" in row]
    assert own, "some rows must show their own sampling parameters"
    assert len(rows) - len(own) >= 52, "most rows must take the job's parameters"
    for row in own:
        assert row["sampling_params"], row["id"]
        assert row["sampling_params"].keys() <= SAMPLING_KEYS, row["id"]


def test_sampling_values_of_a_key_have_one_type(rows: list[dict[str, Any]]) -> None:
    # Columnar readers infer one type per field.
    types: dict[str, set[type]] = {}
    for row in rows:
        for key, value in row.get("sampling_params", {}).items():
            types.setdefault(key, set()).add(type(value))
    assert {key: kinds for key, kinds in types.items() if len(kinds) > 1} == {}
