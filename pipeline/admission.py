"""From a raw row to token ids, or to the reason why it cannot run."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.config import DataConfig
from pipeline.errors import InputError, Refusal, describe, kind_of
from pipeline.readers import RawRow
from pipeline.requests import digest_prompt
from pipeline.templates import PromptTemplate
from workers.config import SamplingParams

_OWN = ("id", "prompt", "messages", "prompt_token_ids", "sampling_params")
_OPENAI = {"custom_id", "method", "url", "body"}
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass
class AdmittedRow:
    """A row of the plan. Exactly one of `prompt_token_ids` and `error` is set.

    `raw` is what the file has where that cannot run, `num_truncated_tokens` how many tokens were cut from
    the prompt. `prompt_digest`, and where the first row with the same is, if another is: see
    `pipeline.duplicates`.
    """

    source: str
    row: int
    id: str
    prompt: str | None = None
    messages: list[dict[str, str]] | None = None
    prompt_token_ids: list[int] | None = None
    sampling_params: str | None = None
    error_type: str | None = None
    error: str | None = None
    raw: str | None = None
    prompt_digest: bytes | None = None
    first_shard: str | None = None
    first_row: int | None = None
    num_truncated_tokens: int = 0
    carried: dict[str, Any] = field(default_factory=dict)
    max_total_tokens: int = 0


def load_tokenizer(folder: Path) -> Any:
    """The checkpoint's tokenizer; raises InputError if it has none that runs without foreign code."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # Foreign content in foreign code: any error says what is wrong.
        raise InputError(f"{folder}: no usable tokenizer ({error})") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise InputError(
            f"{folder}: the tokenizer {type(tokenizer).__name__} has no tokenizer.json"
        )
    return tokenizer


def tokenizer_digest(tokenizer: Any) -> str:
    """Name a tokenizer by what it does (sha256, hex): its vocabulary and rules, and the chat template."""
    parts = [tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class Admission:
    """Turns raw rows into plan rows: identity, prompt, tokens and the row's own parameters."""

    def __init__(
        self,
        tokenizer: Any,
        defaults: SamplingParams,
        max_model_len: int,
        vocab_size: int,
        data: DataConfig | None = None,
    ) -> None:
        """Keep the run's parameters; raises InputError if they do not fit the model."""
        self._tokenizer = tokenizer
        data = data or DataConfig()
        self._template, self._too_long = PromptTemplate(data), data.too_long
        self._share_duplicates = data.share_duplicates
        self._defaults = defaults.model_dump(mode="json")
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        if outside := self._outside(defaults.stop_token_ids):
            raise InputError(f"sampling.stop_token_ids: {outside}")

    def admit(self, raw: RawRow, source: str) -> AdmittedRow:
        """Never raises for a row's sake: a row that cannot run says why."""
        row_id = f"{source}:{raw.row}"
        admitted = AdmittedRow(source=source, row=raw.row, id=row_id, raw=raw.text)
        try:
            self._fill_(admitted, raw)
        except Refusal as refusal:
            admitted.prompt_token_ids = None
            if raw.columns is not None:
                admitted.raw = json.dumps(raw.columns, ensure_ascii=False, default=str)
            admitted.error_type = refusal.error_type
            admitted.error = _located(raw.where, str(refusal))
        return admitted

    def _fill_(self, admitted: AdmittedRow, raw: RawRow) -> None:
        if raw.columns is None:
            raise Refusal("BadRow", raw.error or "unreadable row")
        columns = _from_openai(raw.columns)
        admitted.carried = {k: v for k, v in columns.items() if k not in _OWN}
        if huge := [k for k, value in admitted.carried.items() if _has_huge_number(value)]:
            admitted.carried = {k: v for k, v in admitted.carried.items() if k not in huge}
            raise Refusal("BadRow", f"column {huge[0]!r} has a whole number of more than 64 bits")
        if columns.get("id") is not None:
            admitted.id = _read_id(columns["id"])
        columns, replaced = self._template.apply(columns)
        admitted.carried |= replaced
        prompt, messages = columns.get("prompt"), columns.get("messages")
        if isinstance(prompt, str):
            admitted.prompt = prompt
        params = self._read_params(columns.get("sampling_params"))
        admitted.sampling_params = json.dumps(params[0], ensure_ascii=False) if params[0] else None
        given = [
            k for k in ("prompt", "messages", "prompt_token_ids") if columns.get(k) is not None
        ]
        if len(given) != 1:
            raise Refusal(
                "NoPrompt" if not given else "AmbiguousPrompt",
                "no prompt, messages or prompt_token_ids"
                if not given
                else f"both {' and '.join(given)}",
            )
        if messages is not None:
            admitted.messages = _check_messages(messages)
        tokens = self._tokenize(admitted, columns)
        whole = len(tokens)
        tokens = self._truncate(tokens, params[1].max_tokens)
        admitted.num_truncated_tokens = whole - len(tokens)
        if len(tokens) >= self._max_model_len:
            raise Refusal(
                "PromptTooLong",
                f"the prompt has {len(tokens)} tokens, and prompt and answer together may have "
                f"{self._max_model_len}",
            )
        admitted.prompt_token_ids = tokens
        if self._share_duplicates:
            admitted.prompt_digest = digest_prompt(tokens, params[0])
        admitted.max_total_tokens = min(len(tokens) + params[1].max_tokens, self._max_model_len)

    def _truncate(self, tokens: list[int], max_tokens: int) -> list[int]:
        """The prompt as the configuration wants it, if it and its answer are too long together."""
        room = max(self._max_model_len - max_tokens, self._max_model_len // 2)
        if self._too_long == "refuse" or len(tokens) <= room:
            return tokens
        return tokens[-room:] if self._too_long == "truncate-left" else tokens[:room]

    def _read_params(self, given: Any) -> tuple[dict[str, Any], SamplingParams]:
        """The row's own parameters, and those merged over the run's."""
        if given is None:
            return {}, SamplingParams.model_validate(self._defaults)
        if not isinstance(given, dict):
            raise Refusal(
                "InvalidSamplingParams", f"sampling_params is {kind_of(given)}, not an object"
            )
        own = {k: v for k, v in given.items() if v is not None}  # Parquet fills structs with nulls.
        try:
            merged = json.dumps(self._defaults | own)
            params = SamplingParams.model_validate_json(merged, strict=True)
        except ValidationError as error:
            raise Refusal("InvalidSamplingParams", describe(error, "sampling_params")) from error
        except (TypeError, ValueError) as error:
            raise Refusal("InvalidSamplingParams", f"sampling_params: {error}") from error
        if outside := self._outside(params.stop_token_ids):
            raise Refusal("InvalidSamplingParams", f"sampling_params.stop_token_ids: {outside}")
        return own, params

    def _outside(self, token_ids: Iterable[int]) -> str:
        """What is wrong with token ids that the model does not know; empty if nothing is."""
        strange = [i for i in token_ids if not 0 <= i < self._vocab_size]
        return f"{strange[0]} is not in the vocabulary of {self._vocab_size}" if strange else ""

    def _tokenize(self, admitted: AdmittedRow, columns: dict[str, Any]) -> list[int]:
        if admitted.messages is not None:
            text = self._apply_template(admitted.messages)
            tokens = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        elif (ids := columns.get("prompt_token_ids")) is not None:
            tokens = _check_token_ids(ids, self._vocab_size)
        else:
            prompt = columns["prompt"]
            if not isinstance(prompt, str):
                raise Refusal("InvalidPrompt", f"prompt is {kind_of(prompt)}, not a string")
            tokens = self._tokenizer(prompt)["input_ids"]
        if not tokens:
            raise Refusal("InvalidPrompt", "the prompt is empty")
        return [int(token) for token in tokens]

    def _apply_template(self, messages: list[dict[str, str]]) -> str:
        if not self._tokenizer.chat_template:
            raise Refusal("NoChatTemplate", "the model has no chat template; give `prompt` instead")
        from jinja2 import TemplateError

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise Refusal("TemplateFailed", f"the chat template fails: {error}") from error


def _has_huge_number(value: Any) -> bool:
    """Whether there is an integer that no column of a data set can hold."""
    if isinstance(value, dict):
        return any(map(_has_huge_number, value.values()))
    if isinstance(value, list):
        return any(map(_has_huge_number, value))
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _read_id(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise Refusal("InvalidId", f"id is {kind_of(value)}, not a string")
    if value == "":
        raise Refusal("InvalidId", "id is empty")
    return str(value)


def _check_messages(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise Refusal("InvalidMessages", "messages must be a list with at least one message")
    for index, message in enumerate(messages):
        at = f"messages[{index}]"
        if not isinstance(message, dict):
            raise Refusal("InvalidMessages", f"{at} is {kind_of(message)}, not an object")
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise Refusal(
                "InvalidMessages", f"{at}.role is {role!r}, not one of {', '.join(_ROLES)}"
            )
        if not isinstance(content, str):
            raise Refusal("InvalidMessages", f"{at}.content is {kind_of(content)}, not a string")
        if extra := [
            k for k, v in message.items() if k not in ("role", "content") and v is not None
        ]:
            raise Refusal(
                "InvalidMessages", f"{at} has the key {extra[0]!r}, which is not understood"
            )
    return [{"role": m["role"], "content": m["content"]} for m in messages]


def _check_token_ids(ids: Any, vocab_size: int) -> list[int]:
    whole = isinstance(ids, list) and all(
        isinstance(i, int) and not isinstance(i, bool) for i in ids
    )
    if not whole:
        raise Refusal("InvalidPrompt", "prompt_token_ids must be a list of integers")
    if outside := [i for i in ids if not 0 <= i < vocab_size]:
        raise Refusal(
            "InvalidPrompt", f"token id {outside[0]} is not in the vocabulary of {vocab_size}"
        )
    return list(ids)


def _from_openai(columns: dict[str, Any]) -> dict[str, Any]:
    """The row an OpenAI batch line stands for; other rows as they are."""
    if not columns.keys() >= _OPENAI or not isinstance(columns["body"], dict):
        return columns
    body = dict(columns["body"])
    row = {k: v for k, v in columns.items() if k not in _OPENAI}
    row |= {"id": columns["custom_id"], "messages": body.pop("messages", None)}
    row["prompt"] = body.pop("prompt", None)
    body.pop("model", None)
    if "max_completion_tokens" in body:
        body["max_tokens"] = body.pop("max_completion_tokens")
    return row | {"sampling_params": body or None}


def _located(where: str, message: str) -> str:
    return message if message.startswith(where) else f"{where}: {message}"
