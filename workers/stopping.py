"""Where an answer ends: EOS, stop tokens, stop strings, and the length it may have."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from workers.config import SamplingParams
from workers.request import FinishReason


class TextStream(Protocol):
    """Text of a growing answer."""

    def step(self, token_id: int) -> str:
        """The text that one more token completes; empty while a character is unfinished."""
        ...


class Detokenizer(Protocol):
    """Token ids to text, special tokens left out."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer."""
        ...

    def stream(self) -> TextStream:
        """A fresh stream for one answer."""
        ...


class TokenizerText:
    """A Detokenizer over the checkpoint's own tokenizer (its tokenizer.json as a string)."""

    def __init__(self, tokenizer_json: str) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer_json)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def stream(self) -> TextStream:
        """A fresh stream for one answer."""
        return _TokenizerStream(self._tokenizer)


class _TokenizerStream:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def step(self, token_id: int) -> str:
        return self._stream.step(self._tokenizer, token_id) or ""


@dataclass(frozen=True)
class End:
    """Why an answer ended; `cut` is the length of its text before a stop string."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None
    cut: int | None = None


class StopChecker:
    """Watches one row's answer, told every token in order."""

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Iterable[int],
        detokenizer: Detokenizer,
        max_tokens: int,
    ) -> None:
        """Keep the row's rules; `max_tokens` is the params' own, or less if the cache holds less."""
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._stop = params.stop
        self._min_tokens, self.max_tokens = params.min_tokens, max_tokens
        self._stream = detokenizer.stream() if params.stop else None
        self._text = ""
        self._num_tokens = 0

    @property
    def end_token_ids(self) -> list[int]:
        """The ids that end the answer."""
        return sorted(self._eos | self._stop_ids)

    def check(self, token_id: int) -> End | None:
        """Take the next token; the first rule that it meets decides, the length last."""
        self._num_tokens += 1
        known = len(self._text)
        if self._stream is not None:
            self._text += self._stream.step(token_id)
        if self._num_tokens > self._min_tokens:
            if token_id in self._stop_ids:
                return End("stop", token_id)
            if token_id in self._eos:
                return End("stop")
            if found := self._find_stop(known):
                return found
        return End("length") if self._num_tokens >= self.max_tokens else None

    def _find_stop(self, known: int) -> End | None:
        """The first stop string that the text beyond its first `known` characters completes."""
        starts = [(stop, max(0, known - len(stop) + 1)) for stop in self._stop]
        found = [(self._text.find(stop, start), stop) for stop, start in starts]
        hits = [(at, stop) for at, stop in found if at >= 0]
        if not hits:
            return None
        at, stop = min(hits)
        return End("stop", stop, cut=at)
