"""What a row's prompt is made of: a column, a template over the columns, a system prompt."""

from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.config import DataConfig
from pipeline.errors import InputError, Refusal, kind_of

_PROMPTS = ("prompt", "messages", "prompt_token_ids")


class PromptTemplate:
    """Gives rows the prompt that the configuration makes of their columns."""

    def __init__(self, config: DataConfig) -> None:
        """Compile the template; raises InputError if it is none."""
        self._config = config
        self._template = None
        if config.prompt_template is not None:
            # Templates come with configurations that others wrote: they see columns, nothing else.
            environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
            try:
                self._template = environment.from_string(config.prompt_template)
            except TemplateError as error:
                raise InputError(f"data.prompt_template: {error}") from error

    def __reduce__(self) -> tuple[type["PromptTemplate"], tuple[DataConfig]]:
        """Compiled templates do not travel between processes; configurations do."""
        return PromptTemplate, (self._config,)

    def apply(self, columns: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The row with its prompt, and those of its own prompt columns that the prompt replaced.

        Raises:
            Refusal: a column is missing, or the template fails.
        """
        replaced: dict[str, Any] = {}
        text = None
        if self._config.prompt_column is not None:
            text = _read_column(columns, self._config.prompt_column)
        if self._template is not None:
            text = self._render(columns if text is None else columns | {"prompt": text})
        if text is not None:
            replaced = {k: columns[k] for k in _PROMPTS if columns.get(k) not in (None, text)}
            columns = {k: v for k, v in columns.items() if k not in _PROMPTS} | {"prompt": text}
        if self._config.makes_chats and isinstance(columns.get("prompt"), str):
            message = {"role": "user", "content": columns["prompt"]}
            columns = {k: v for k, v in columns.items() if k != "prompt"} | {"messages": [message]}
        if self._config.system_prompt is not None:
            columns = self._with_system_prompt(columns, self._config.system_prompt)
        return columns, replaced

    def _render(self, columns: dict[str, Any]) -> str:
        assert self._template is not None
        try:
            return self._template.render(columns)
        except Exception as error:  # A template may raise whatever its expressions do.
            raise Refusal("TemplateFailed", f"the prompt template fails: {error}") from error

    def _with_system_prompt(self, columns: dict[str, Any], text: str) -> dict[str, Any]:
        if columns.get("prompt_token_ids") is not None:
            raise Refusal("AmbiguousPrompt", "a system prompt cannot precede prompt_token_ids")
        messages = columns.get("messages")
        if not isinstance(messages, list) or _begins_with_system(messages):
            return columns
        return columns | {"messages": [{"role": "system", "content": text}, *messages]}


def _read_column(columns: dict[str, Any], name: str) -> str:
    text = columns.get(name)
    if text is None:
        there = ", ".join(map(repr, columns)) or "none"
        raise Refusal("NoPrompt", f"no column {name!r}; its columns are {there}")
    if not isinstance(text, str):
        raise Refusal("InvalidPrompt", f"column {name!r} is {kind_of(text)}, not a string")
    return text


def _begins_with_system(messages: list[Any]) -> bool:
    first = messages[0] if messages else None
    return isinstance(first, dict) and first.get("role") in ("system", "developer")
