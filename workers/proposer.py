"""Where drafts come from: one proposer per row, behind one protocol."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from workers.request import Request


class Confidence(NamedTuple):
    """What a proposer knows about one drafted token, supposing those before it in the draft are right.

    `match_length` is how many tokens before it were seen together before; `share` how often, of those
    times, this token came next.
    """

    match_length: int
    share: float = 1.0


@dataclass(frozen=True)
class Draft:
    """Tokens guessed to come next; a point mass each: right or wrong, never likely.

    `confidences` has one entry a token, or none at all where the proposer knows nothing.
    """

    token_ids: tuple[int, ...] = ()
    confidences: tuple[Confidence, ...] = ()

    def cut(self, length: int) -> "Draft":
        """The first `length` tokens."""
        return Draft(self.token_ids[:length], self.confidences[:length])


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
