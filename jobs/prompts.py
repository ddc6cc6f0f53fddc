"""Prompts to measure with: every row must be usable, or there is nothing to compare."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.admission import Admission
from pipeline.errors import InputError
from pipeline.sources import read_rows
from workers.config import SamplingParams


@dataclass(frozen=True)
class Prompt:
    """A prompt with the columns of its row, `where` that is, and its `task` column or its file's name."""

    task: str
    where: str
    columns: dict[str, Any]
    token_ids: tuple[int, ...]


def read_prompts(uri: str, tokenizer: Any, name: str) -> Iterator[Prompt]:
    """The prompts of a file; raises InputError if there are none, or a row is unusable.

    `name` is what the file was given as, for the message.
    """
    admission = Admission(tokenizer, SamplingParams(), sys.maxsize, len(tokenizer))
    found = False
    for raw in read_rows(uri):
        row = admission.admit(raw, uri)
        if row.prompt_token_ids is None or raw.columns is None:
            raise InputError(f"{name}: {row.error}")
        found = True
        task = str(raw.columns.get("task") or Path(uri).name)
        yield Prompt(task, raw.where, raw.columns, tuple(row.prompt_token_ids))
    if not found:
        raise InputError(f"{name}: {uri}: holds no prompts")


def check_lengths(prompts: Sequence[Prompt], max_tokens: int, limit: int) -> None:
    """Raise InputError if a prompt and its answer do not fit the model."""
    for prompt in prompts:
        length = len(prompt.token_ids)
        if length + max_tokens > limit:
            raise InputError(
                f"{prompt.where}: a prompt of {length} tokens and {max_tokens} new ones exceed the "
                f"model's {limit}"
            )


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """So many of the prompts, evenly over all of them."""
    count = min(count, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]
