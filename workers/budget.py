"""How many drafted tokens a step verifies, and whose: those that are worth their price.

A drafted token costs what one more token adds to the pass (`workers.step_times`). It is worth the
seconds that its acceptance saves, times how likely that is. The likelihood is learned from what
became of earlier drafts, those included that were proposed and not verified. (The idea of a budget from
measured step times: SmartSpec, arXiv 2406.14066.) What steps cost beyond the measured times, for
attention over long rows above all, is learned as they are taken, and so is what proposing costs: where
drafts do not earn that, they are left alone for some time. Whatever is chosen, the answers are the same.

Legend: B rows, k drafted tokens.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workers.proposer import Confidence, Draft
from workers.step_times import StepTimes

_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # Lower edges of the buckets of match lengths.
_SHARES = (0.0, 0.4, 0.6, 0.8, 0.95)  # Of shares.
# What is believed of a token before any has been seen, by the bucket of its match length, and how many
# tokens that belief counts for. (Qwen2.5-Coder-1.5B on mixed prompts.)
_PRIOR = (0.28, 0.55, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
_PRIOR_WEIGHT = 8.0
_MEMORY = 1000.0  # Tokens after which the past counts half.
_INTERVALS = 32
# Of a step's price, what every row bears alike: which rows will be the last is not known for sure.
_SHARED_ALIKE = 0.6
# Of a draft's worth, what counts: the chances are estimates, and those chosen that look best; and rows
# that drafts bring to their ends at different times leave a batch that is not full.
_COUNTED = 0.85
_LEARNED = 1 / 16  # Share of a new step in what is learned about steps.
_DOUBT = 1.0  # Of drafted tokens, squared: how slowly seconds are laid to them.
_MARGIN = 2.0  # Gains are estimates, and chosen for being large.
_WINDOW = 8  # Steps after which what drafts gained is held against what proposing them cost.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 16, 256  # Steps without drafts where that was more.


class AcceptanceRates:
    """How often drafted tokens were right, given that those before them were, by their confidence."""

    def __init__(self) -> None:
        self._right = [
            _PRIOR_WEIGHT * prior * (0.5 + 0.5 * share) for prior in _PRIOR for share in _SHARES
        ]
        self._seen = [_PRIOR_WEIGHT] * len(self._right)

    def rate(self, confidence: Confidence) -> float:
        """The chance that a token of this confidence is right; between 0 and 1."""
        bucket = _bucket(confidence)
        return self._right[bucket] / self._seen[bucket]

    def observe(self, draft: Draft, token_ids: Sequence[int]) -> None:
        """Learn from the tokens that came where `draft` (verified or not) had been proposed."""
        pairs = zip(draft.token_ids, draft.confidences, token_ids, strict=False)
        for guess, confidence, token_id in pairs:
            bucket = _bucket(confidence)
            self._right[bucket] += guess == token_id
            self._seen[bucket] += 1
            if self._seen[bucket] >= _MEMORY:
                self._right[bucket] /= 2
                self._seen[bucket] /= 2
            if guess != token_id:
                return


def _bucket(confidence: Confidence) -> int:
    length = max(bisect_right(_LENGTHS, confidence.match_length), 1) - 1
    return length * len(_SHARES) + bisect_right(_SHARES, confidence.share) - 1


class _Beyond:
    """What steps take beyond the measured times, for attention over long rows above all.

    It is laid to the rows and to the drafted tokens of the steps by least squares over those of late; to
    rows alone, until there is reason to think otherwise.
    """

    def __init__(self) -> None:
        self._squares = np.array([[1.0, 0.0], [0.0, _DOUBT]])
        self._products = np.zeros(2)
        self._fit()

    def observe(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        """Learn from a step that took so many seconds more than the times say."""
        counts = np.array([num_rows, num_drafted], np.float64)
        self._squares += (np.outer(counts, counts) - self._squares) * _LEARNED
        self._products += (counts * seconds - self._products) * _LEARNED
        self._fit()

    def _fit(self) -> None:
        (rr, rd), (_, dd) = self._squares
        r, d = self._products
        # The seconds of each, none below zero.
        self.per_draft = max((d * rr - r * rd) / (rr * (dd + _DOUBT) - rd * rd), 0.0)
        self.per_row = max((r - self.per_draft * rd) / rr, 0.0)


@dataclass(frozen=True)
class Candidate:
    """A decoding row before a step.

    Attributes:
        draft: what its proposer has.
        num_left: the most tokens its answer may still get.
        ends_by_itself: whether EOS or a stop may come before that.
    """

    draft: Draft
    num_left: int
    ends_by_itself: bool = True


class DraftBudget:
    """Chooses draft lengths step by step, and learns from every step."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._rates = AcceptanceRates()
        self._num_tokens, self._num_ends = 200.0, 1.0
        self._beyond = _Beyond()
        # Of a window: steps with proposals, the seconds drafts save there, and what proposing them takes.
        self._num_proposed, self._gain, self._cost = 0, 0.0, 0.0
        # Steps yet to do without proposals, and how many the next pause has.
        self._num_paused, self._pause = 0, _SHORTEST_PAUSE

    @property
    def times(self) -> StepTimes:
        """What passes cost, as measured."""
        return self._times

    @property
    def is_paused(self) -> bool:
        """Whether proposing costs more than it gains, as far as known: the next step can do without."""
        return self._num_paused > 0

    def observe(self, draft: Draft, token_ids: Sequence[int], *, ended: bool) -> None:
        """Learn what came (`token_ids`) where `draft` had been proposed, and whether the answer ended
        there by itself.
        """
        self._rates.observe(draft, token_ids)
        self._num_tokens += len(token_ids)
        self._num_ends += ended

    def observe_step(
        self, num_rows: int, num_tokens: int, seconds: float, seconds_drafting: float
    ) -> None:
        """Learn what a step took, and what proposing drafts for it had taken.

        Args:
            num_rows: decoding rows; prompts had no part in the step.
            num_tokens: theirs, drafted ones included.
            seconds: of the step, without what drafts took.
            seconds_drafting: to propose and to choose.
        """
        beyond = seconds - float(self._times(num_tokens))
        self._beyond.observe(num_rows, num_tokens - num_rows, beyond)
        if self.is_paused:
            self._num_paused -= 1
            return
        self._cost += seconds_drafting
        self._num_proposed += 1
        if self._num_proposed < _WINDOW:
            return
        if self._gain < _MARGIN * self._cost:
            self._num_paused = self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        else:
            self._pause = _SHORTEST_PAUSE
        self._num_proposed, self._gain, self._cost = 0, 0.0, 0.0

    def choose(
        self, rows: Sequence[Candidate], num_prompt_tokens: int, num_waiting: int
    ) -> list[int]:
        """How much of each row's draft to verify.

        Args:
            rows: the decoding rows.
            num_prompt_tokens: prompt tokens that share the pass.
            num_waiting: requests that wait for a row to become free.

        Returns:
            A length for each row, 0 included.
        """
        owners, chances = self._chances(rows)
        if not len(owners):
            return [0] * len(rows)
        num_rows = len(rows)
        costs_k = self._times(num_rows + np.arange(len(owners) + 1))
        costs_k += self._beyond.per_row * num_rows
        costs_k += self._beyond.per_draft * np.arange(len(costs_k))
        best_k = np.concatenate([[0.0], np.sort(chances)[::-1].cumsum()])
        seconds_per_token = float(np.min(costs_k / (num_rows + best_k)))
        if num_waiting:
            worth = _COUNTED * chances * seconds_per_token
        else:
            plain = float(costs_k[0]) / num_rows
            ending = self._worth_of_ending(rows)[owners]
            worth = _COUNTED * chances * ending * (seconds_per_token / plain)
        if num_prompt_tokens:
            costs_k = self._times(num_rows + num_prompt_tokens + np.arange(len(owners) + 1))
        order = np.argsort(-worth, kind="stable")  # Stable: a row's tokens keep their order.
        gains_k = np.concatenate([[0.0], worth[order].cumsum()]) - (costs_k - costs_k[0])
        best = int(gains_k.argmax())
        if not num_prompt_tokens:  # What proposing takes is learned of such steps alone, too.
            self._gain += float(gains_k[best])
        return [int(n) for n in np.bincount(owners[order[:best]], minlength=num_rows)]

    def _chances(self, rows: Sequence[Candidate]) -> tuple[np.ndarray, np.ndarray]:
        """For every drafted token, its row and the chance that it and all before it are accepted."""
        owners, chances = [], []
        for index, row in enumerate(rows):
            chance = 1.0
            for confidence in row.draft.confidences:
                chance *= self._rates.rate(confidence)
                owners.append(index)
                chances.append(chance)
        return np.array(owners, np.int64), np.array(chances)

    def _worth_of_ending(self, rows: Sequence[Candidate]) -> np.ndarray:
        """Seconds saved for each row [B] that is a token nearer its end, when no request waits.

        Without a successor a row that ends makes the batch smaller, and the steps that the longest rows
        still need are paid for by these alone. So the price of a step is shared out: what a step gets
        cheaper by in some stretch of the future goes to the rows that end there. Rows that end
        together share alike, the last one alone bears what a step costs even for one. That supposes to
        know who ends when; as nobody does, a part of the price (_SHARED_ALIKE) is borne alike by all.
        """
        left_B1 = np.array([[row.num_left] for row in rows], np.float64)
        rate = self._num_ends / self._num_tokens
        rate_B1 = np.array([[rate if row.ends_by_itself else 0.0] for row in rows])
        at = np.linspace(0, left_B1.max(), _INTERVALS + 1)
        there = np.where(at < left_B1, (1 - rate_B1) ** at, 0.0)  # Chance that a row is not over.
        sizes = there.sum(axis=0)
        cheaper = -np.diff(self._times(sizes) + self._beyond.per_row * sizes)
        ending = -np.diff(there, axis=1)
        worth_B = (ending * (cheaper / np.maximum(ending.sum(axis=0), 1e-12))).sum(axis=1)
        alike = float(self._times(len(rows))) / len(rows) + self._beyond.per_row
        result: np.ndarray = _SHARED_ALIKE * alike + (1 - _SHARED_ALIKE) * worth_B
        return result
