"""Where drafts come from: one proposer per row, behind one protocol."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from workers.config import EngineConfig
from workers.request import Request


@dataclass(frozen=True)
class Draft:
    """Tokens guessed to come next; a point mass each: right or wrong, never likely."""

    token_ids: tuple[int, ...] = ()


class Proposer(Protocol):
    """Guesses a row's next tokens from what the row holds; whatever it says, the answer is the same."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in tokens that are now part of the row; called with the prompt first."""
        ...

    def propose(self, max_tokens: int) -> Draft:
        """Draft at most `max_tokens` (>= 1) tokens; an empty draft is a legal answer."""
        ...


ProposerFactory = Callable[[Request], Proposer]


class NoProposer:
    """Drafts nothing: plain decoding."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Nothing to learn."""

    def propose(self, max_tokens: int) -> Draft:  # noqa: ARG002
        """An empty draft."""
        return Draft()


class NgramProposer:
    """Prompt lookup: copy what followed the latest earlier occurrence of the row's last n tokens.

    The longest n-gram that occurs wins, from `max_n` down to `min_n` (Saxena, "Prompt Lookup
    Decoding", 2023). The copy may run into itself, so that a loop is drafted as far as asked.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self._sizes = range(max_n, min_n - 1, -1)
        self._tokens: list[int] = []
        # n-gram -> position of the token after its latest occurrence.
        self._following: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        """Index the n-grams that the new tokens follow."""
        for token_id in token_ids:
            position = len(self._tokens)
            for n in self._sizes:
                if n <= position:
                    self._following[tuple(self._tokens[position - n :])] = position
            self._tokens.append(token_id)

    def propose(self, max_tokens: int) -> Draft:
        """Copy up to `max_tokens` tokens from the longest match."""
        for n in self._sizes:
            start = (
                self._following.get(tuple(self._tokens[-n:])) if n <= len(self._tokens) else None
            )
            if start is not None:
                known = self._tokens[start : start + max_tokens]
                return Draft(tuple(known[j % len(known)] for j in range(max_tokens)))
        return Draft()


def build_proposer(config: EngineConfig) -> ProposerFactory:
    """The factory of the configured proposer."""
    match config.proposer:
        case "none":
            return lambda _request: NoProposer()
        case "ngram":
            return lambda _request: NgramProposer(
                config.prompt_lookup_min, config.prompt_lookup_max
            )
