"""Acceptance statistics: counts are kept, ratios are derived."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest


@dataclass(frozen=True)
class AcceptanceStats:
    """What drafting did for one sample, or, added up, for many.

    Attributes:
        num_steps: passes that gave the sample a token, the prefill's and draftless ones included.
        num_draft_tokens: tokens drafted.
        histogram: entry j counts the steps with a draft that accepted exactly j of its tokens.
    """

    num_steps: int = 0
    num_draft_tokens: int = 0
    histogram: tuple[int, ...] = ()

    @classmethod
    def of_steps(cls, steps: Sequence[tuple[int, int]], num_spec_tokens: int) -> "AcceptanceStats":
        """Count steps given as (drafted, accepted); a step without a draft is (0, 0)."""
        histogram = [0] * (num_spec_tokens + 1 if num_spec_tokens else 0)
        for drafted, accepted in steps:
            if drafted:
                histogram[accepted] += 1
        return cls(len(steps), sum(drafted for drafted, _ in steps), tuple(histogram))

    def __add__(self, other: "AcceptanceStats") -> "AcceptanceStats":
        pairs = zip_longest(self.histogram, other.histogram, fillvalue=0)
        return AcceptanceStats(
            self.num_steps + other.num_steps,
            self.num_draft_tokens + other.num_draft_tokens,
            tuple(a + b for a, b in pairs),
        )

    @property
    def num_spec_steps(self) -> int:
        """Steps in which something was drafted."""
        return sum(self.histogram)

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Drafted tokens that became part of the answer (or that a stop cut off)."""
        return sum(accepted * steps for accepted, steps in enumerate(self.histogram))

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per step with a draft, the recovered or bonus token included."""
        if not self.num_spec_steps:
            return None
        return 1 + self.num_accepted_draft_tokens / self.num_spec_steps

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted / drafted."""
        if not self.num_draft_tokens:
            return None
        return self.num_accepted_draft_tokens / self.num_draft_tokens
