"""Prompts made of a row's columns."""

import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.config import DataConfig
from pipeline.errors import InputError, Refusal
from pipeline.templates import PromptTemplate

SYSTEM = {"role": "system", "content": "Be brief."}


def applied(columns: dict[str, Any], **config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return PromptTemplate(DataConfig(**config)).apply(columns)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_nothing_asked_for_changes_nothing() -> None:
    row = {"prompt": "a", "messages": None, "x": 1}
    assert applied(row) == (row, {})


def test_a_column() -> None:
    row, replaced = applied({"question": "a", "prompt": "b", "x": 1}, prompt_column="question")
    assert row == {"question": "a", "x": 1, "prompt": "a"}
    assert replaced == {"prompt": "b"}


def test_a_template() -> None:
    template = "{% for t in tags %}{{ t }},{% endfor %}{{ prompt|upper }}{{ n + 1 }}"
    row, replaced = applied({"prompt": "a", "tags": ["x", "y"], "n": 1}, prompt_template=template)
    assert row == {"tags": ["x", "y"], "n": 1, "prompt": "x,y,A2"}
    assert replaced == {"prompt": "a"}


def test_a_template_around_a_column() -> None:
    config = {"prompt_column": "q", "prompt_template": "Q: {{ prompt }} ({{ n }})"}
    row = {"q": "a", "prompt": "b", "n": 1}
    assert applied(row, **config) == ({"q": "a", "n": 1, "prompt": "Q: a (1)"}, {"prompt": "b"})


def test_the_column_may_be_called_prompt() -> None:
    assert applied({"prompt": "a"}, prompt_column="prompt") == ({"prompt": "a"}, {})


def test_messages_are_replaced_too() -> None:
    row, replaced = applied({"messages": [user("a")], "q": "b"}, prompt_column="q")
    assert row == {"q": "b", "prompt": "b"}
    assert replaced == {"messages": [user("a")]}


def test_chat_and_system_prompt() -> None:
    assert applied({"prompt": "a"}, chat=True)[0] == {"messages": [user("a")]}
    assert applied({"prompt": "a"}, system_prompt="Be brief.")[0] == {
        "messages": [SYSTEM, user("a")]
    }
    assert applied({"q": "a"}, prompt_column="q", system_prompt="Be brief.")[0] == {
        "q": "a",
        "messages": [SYSTEM, user("a")],
    }


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_row_keeps_its_own_system_message(role: str) -> None:
    messages = [{"role": role, "content": "Rhyme."}, user("a")]
    row = {"messages": messages}
    assert applied(row, system_prompt="Be brief.") == (row, {})


def test_odd_messages_are_left_to_admission() -> None:
    for odd in ("text", 1, None, {}):
        row = {"messages": odd}
        assert applied(row, system_prompt="Be brief.") == (row, {})
    assert applied({"messages": []}, system_prompt="s")[0] == {
        "messages": [{"role": "system", "content": "s"}]
    }


@pytest.mark.parametrize(
    ("columns", "config", "kind", "reason"),
    [
        ({"a": 1}, {"prompt_column": "q"}, "NoPrompt", "no column 'q'; its columns are 'a'"),
        ({"q": None}, {"prompt_column": "q"}, "NoPrompt", "no column 'q'"),
        ({"q": 1}, {"prompt_column": "q"}, "InvalidPrompt", "column 'q' is an int"),
        ({"a": 1}, {"prompt_template": "{{ q }}"}, "TemplateFailed", "'q' is undefined"),
        ({"a": 0}, {"prompt_template": "{{ 1 / a }}"}, "TemplateFailed", "division"),
        (
            {"a": "x"},
            {"prompt_template": "{{ a.__class__.__mro__ }}"},
            "TemplateFailed",
            "unsafe",
        ),
        ({"a": [1]}, {"prompt_template": "{{ a.append(2) }}"}, "TemplateFailed", "unsafe"),
        ({"prompt_token_ids": [1]}, {"system_prompt": "s"}, "AmbiguousPrompt", "token_ids"),
    ],
)
def test_rows_that_have_no_such_prompt(
    columns: dict[str, Any], config: dict[str, Any], kind: str, reason: str
) -> None:
    with pytest.raises(Refusal, match=reason) as raised:
        applied(columns, **config)
    assert raised.value.error_type == kind


def test_a_template_that_is_none() -> None:
    with pytest.raises(InputError, match=r"data\.prompt_template: unexpected"):
        PromptTemplate(DataConfig(prompt_template="{{ a"))


def test_a_template_travels() -> None:
    template = PromptTemplate(DataConfig(prompt_template="Q: {{ prompt }}"))
    assert pickle.loads(pickle.dumps(template)).apply({"prompt": "a"})[0] == {"prompt": "Q: a"}


@pytest.mark.parametrize("config", [{"prompt_column": ""}, {"system_prompt": ""}])
def test_empty_names(config: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DataConfig(**config)
