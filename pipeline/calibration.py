"""Calibration texts: prompts (and answers, where a file has them) as the model itself reads them."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.admission import Admission
from pipeline.errors import InputError
from pipeline.sources import RawRow, check_source, read_rows
from quant.config import QuantConfig
from workers.config import SamplingParams

DEFAULT_TEXTS = Path(__file__).parent / "calibration.jsonl"


def read_calibration(config: QuantConfig, tokenizer: Any) -> list[list[int]]:
    """The token ids of the texts that `config` calibrates on; none if its recipe needs none.

    Raises:
        InputError: the file cannot be read, a row of it is unusable, it has fewer rows than asked for, or
            all of them are the same.
    """
    if not config.needs_calibration:
        return []
    uri = config.calibration or str(DEFAULT_TEXTS)
    check_source(uri)
    count = config.num_calibration_samples
    texts = read_texts(uri, tokenizer, count, config.max_calibration_tokens)
    if len(texts) < count:
        raise InputError(
            f"{uri}: holds {len(texts)} calibration texts, and {count} are asked for "
            "(num_calibration_samples)"
        )
    if len(texts) > 1 and all(text == texts[0] for text in texts):
        raise InputError(
            f"{uri}: the first {config.max_calibration_tokens} tokens of all texts are the same; a long "
            "system prompt? Set max_calibration_tokens higher"
        )
    if not any(len(text) > 1 for text in texts):
        raise InputError(f"{uri}: no calibration text has more than one token")
    return texts


def read_texts(uri: str, tokenizer: Any, count: int, max_tokens: int) -> list[list[int]]:
    """At most `count` texts of a prompt file, each cut to `max_tokens` tokens; raises InputError."""
    admission = Admission(tokenizer, SamplingParams(), sys.maxsize, len(tokenizer))
    texts: list[list[int]] = []
    for raw in read_rows(uri):
        row = admission.admit(raw if tokenizer.chat_template else _as_plain(raw), uri)
        if row.prompt_token_ids is None:
            raise InputError(f"{row.error}")
        texts.append(row.prompt_token_ids[:max_tokens])
        if len(texts) == count:
            break
    return texts


def _as_plain(raw: RawRow) -> RawRow:
    """A dialogue as plain text, for models that know no roles."""
    columns = raw.columns
    if not columns or not isinstance(columns.get("messages"), list):
        return raw
    contents: list[Any] = [
        m.get("content") if isinstance(m, dict) else None for m in columns["messages"]
    ]
    if not all(isinstance(content, str) for content in contents):
        return raw
    plain = {key: value for key, value in columns.items() if key != "messages"}
    return replace(raw, columns=plain | {"prompt": "\n".join(map(str, contents))})
