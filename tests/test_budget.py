"""The draft budget: what it learns, what it chooses, and that it never loses (on a clock of ours)."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import PROPERTY
from workers.budget import AcceptanceRates, Candidate, DraftBudget
from workers.ngram import NgramProposer
from workers.proposer import Confidence, Draft, NoProposer, Proposer
from workers.step_times import StepTimes
from workers.suffix import SuffixAutomaton, SuffixProposer

FREE = StepTimes((1, 64), (1.0, 1.0))
DEAR = StepTimes((1, 2), (1.0, 2.0))  # Twice the tokens, twice the time.
MEMORY_BOUND = StepTimes((1, 8, 16, 64), (1.0, 1.1, 1.5, 5.0))
COMPUTE_BOUND = StepTimes((1, 4, 8, 64), (1.0, 1.1, 1.7, 11.0))


def some_draft(length: int, match_length: int = 4) -> Draft:
    return Draft(tuple(range(length)), tuple(Confidence(match_length + j) for j in range(length)))


def taught(times: StepTimes, right: Sequence[bool], match_length: int = 4) -> DraftBudget:
    """A budget that saw first tokens of a confidence be right or wrong, 100 times over."""
    budget = DraftBudget(times)
    for _ in range(100):
        for is_right in right:
            token_ids = [0 if is_right else 9]
            budget.observe(some_draft(1, match_length), token_ids, ended=False)
    return budget


class TestAcceptanceRates:
    def test_rates_approach_what_was_seen(self) -> None:
        rates = AcceptanceRates()
        before = rates.rate(Confidence(2))
        for i in range(400):
            rates.observe(some_draft(1, 2), [0 if i % 10 else 9])
        assert abs(rates.rate(Confidence(2)) - 0.9) < 0.01 < abs(before - 0.9)

    def test_what_lies_behind_a_wrong_token_says_nothing(self) -> None:
        rates = AcceptanceRates()
        before = rates.rate(Confidence(9))
        for _ in range(100):
            rates.observe(Draft((1, 2), (Confidence(1), Confidence(9))), [5, 2])
        assert rates.rate(Confidence(9)) == before

    def test_tokens_of_other_confidence_do_not_count(self) -> None:
        rates = AcceptanceRates()
        others = [Confidence(n, share) for n in (1, 4, 20) for share in (0.1, 0.5, 1.0)]
        before = [rates.rate(c) for c in others]
        for _ in range(100):
            rates.observe(Draft((1,), (Confidence(8, 0.7),)), [1])
        assert [rates.rate(c) for c in others] == before
        assert rates.rate(Confidence(8, 0.75)) > 0.95

    def test_the_past_is_forgotten(self) -> None:
        rates = AcceptanceRates()
        for right in (True, False):
            for _ in range(5000):
                rates.observe(some_draft(1), [0 if right else 9])
        assert rates.rate(Confidence(4)) < 0.05

    @PROPERTY
    @given(st.integers(0, 99), st.floats(0, 1), st.lists(st.booleans(), max_size=30))
    def test_always_a_chance(self, length: int, share: float, seen: list[bool]) -> None:
        rates, confidence = AcceptanceRates(), Confidence(length, share)
        for right in seen:
            rates.observe(Draft((0,), (confidence,)), [0 if right else 1])
        assert 0 < rates.rate(confidence) < 1


class TestChoice:
    @pytest.mark.parametrize("num_waiting", [0, 9])
    def test_what_costs_nothing_is_taken(self, num_waiting: int) -> None:
        rows = [Candidate(some_draft(n), 50) for n in (3, 0, 7)]
        assert DraftBudget(FREE).choose(rows, 0, num_waiting) == [3, 0, 7]

    @pytest.mark.parametrize("num_waiting", [0, 9])
    def test_full_price_is_never_worth_it(self, num_waiting: int) -> None:
        rows = [Candidate(some_draft(5), 50) for _ in range(4)]
        assert taught(DEAR, [True]).choose(rows, 0, num_waiting) == [0, 0, 0, 0]

    def test_the_likelier_row_is_served_first(self) -> None:
        budget = taught(COMPUTE_BOUND, [True, False], match_length=1)
        rows = [Candidate(some_draft(6, 1), 50), Candidate(some_draft(6, 16), 50)]
        short, long = budget.choose(rows, 0, 1)
        assert 0 <= short < long

    def test_the_worth_of_a_token_decides_for_one_row(self) -> None:
        """One row, whose next token costs 20 % of a step: worth it from a chance of 20 % on."""
        times = StepTimes((1, 2, 3), (1.0, 1.2, 1.4))
        row = [Candidate(some_draft(1), 50)]
        assert taught(times, [True, False, False]).choose(row, 0, 0) == [1]
        assert taught(times, [True, *[False] * 9]).choose(row, 0, 0) == [0]

    def test_steps_of_the_price_are_looked_beyond(self) -> None:
        """The second drafted token makes the pass dearer, the next six are free."""
        times = StepTimes((1, 2, 3, 9, 10), (1.0, 1.5, 1.5, 1.5, 9.0))
        assert taught(times, [True], 1).choose([Candidate(some_draft(8, 20), 50)], 0, 0) == [8]

    def test_nothing_to_choose(self) -> None:
        budget = DraftBudget(FREE)
        assert budget.choose([], 5, 0) == []
        assert budget.choose([Candidate(Draft(), 5)] * 2, 0, 0) == [0, 0]

    def test_prompt_tokens_move_the_price(self) -> None:
        """Alone a token is free; behind a prompt's chunk it costs its full price."""
        rows = [Candidate(some_draft(3, 1), 50) for _ in range(2)]
        budget = taught(MEMORY_BOUND, [True, False], 1)
        assert sum(budget.choose(rows, 0, 5)) > sum(budget.choose(rows, 62, 5))

    def test_the_same_past_gives_the_same_choice(self) -> None:
        rows = [Candidate(some_draft(5, n), 50) for n in (1, 3, 9)]
        chosen = [taught(COMPUTE_BOUND, [True, False, True]).choose(rows, 0, 2) for _ in range(2)]
        assert chosen[0] == chosen[1]

    @PROPERTY
    @given(
        st.lists(st.tuples(st.integers(0, 9), st.integers(1, 99), st.booleans()), max_size=20),
        st.integers(0, 300),
        st.integers(0, 3),
    )
    def test_never_more_than_there_is(
        self, given_rows: list[tuple[int, int, bool]], num_prompt_tokens: int, num_waiting: int
    ) -> None:
        rows = [Candidate(some_draft(n), left, ends) for n, left, ends in given_rows]
        lengths = DraftBudget(MEMORY_BOUND).choose(rows, num_prompt_tokens, num_waiting)
        assert len(lengths) == len(rows)
        assert all(0 <= n <= len(row.draft.token_ids) for n, row in zip(lengths, rows, strict=True))


class TestWorthOfEnding:
    """The price of a step, shared out over the rows, when none waits."""

    @staticmethod
    def worth(left: Sequence[int], times: StepTimes, *, ends: bool = False) -> list[float]:
        rows = [Candidate(Draft(), n, ends) for n in left]
        return DraftBudget(times)._worth_of_ending(rows).tolist()

    @pytest.mark.parametrize("ends", [False, True])
    def test_the_shares_add_up_to_a_step(self, ends: bool) -> None:
        for left in ([5], [5, 5, 5], [1, 9, 300], [40, 41, 42, 43]):
            shares = self.worth(left, COMPUTE_BOUND, ends=ends)
            assert sum(shares) == pytest.approx(float(COMPUTE_BOUND(len(left))))
            assert min(shares) > 0

    def test_rows_that_end_together_share_alike(self) -> None:
        assert self.worth([7, 7], COMPUTE_BOUND) == pytest.approx([float(COMPUTE_BOUND(2)) / 2] * 2)

    def test_the_last_row_bears_what_one_costs(self) -> None:
        times = StepTimes((1, 2, 3), (1.0, 1.1, 1.2))
        # Two fifths of it; the rest is borne alike.
        assert self.worth([10, 100, 1000], times) == pytest.approx([0.28, 0.28, 0.64])

    def test_rows_that_may_end_at_any_time_are_more_alike(self) -> None:
        times = StepTimes((1, 2), (1.0, 1.1))
        surely, perhaps = (self.worth([80, 100], times, ends=ends) for ends in (False, True))
        assert surely[0] < perhaps[0] < perhaps[1] < surely[1]


class TestSteps:
    """What is learned from steps as they are taken."""

    ROWS = (Candidate(some_draft(3, 1), 50),) * 4

    def test_long_contexts_make_drafts_worth_more(self) -> None:
        """A step that costs more, whatever is drafted, saves more."""
        budget = taught(COMPUTE_BOUND, [True, False, False], 1)
        before = sum(budget.choose(self.ROWS, 0, 1))
        for _ in range(100):
            budget.observe_step(4, 8, float(COMPUTE_BOUND(8)) + 8.0, 0.0)
        assert sum(budget.choose(self.ROWS, 0, 1)) > before

    def test_steps_as_measured_change_nothing(self) -> None:
        budget, other = (taught(COMPUTE_BOUND, [True, False], 1) for _ in range(2))
        for _ in range(100):
            budget.observe_step(4, 8, float(COMPUTE_BOUND(8)), 0.0)
        for num_waiting in (0, 1):
            chosen = [b.choose(self.ROWS, 5, num_waiting) for b in (budget, other)]
            assert chosen[0] == chosen[1]

    def test_noise_about_the_measured_times_changes_nothing(self) -> None:
        budget = DraftBudget(COMPUTE_BOUND)
        for index in range(200):
            noise = 0.5 if index % 2 else -0.5
            budget.observe_step(4, 8, float(COMPUTE_BOUND(8)) + noise, 0.0)
        assert budget._beyond.per_row == pytest.approx(0, abs=0.01)

    def test_what_few_rows_took_is_not_laid_on_many(self) -> None:
        """A second a step more, however many rows: soon it is known as a second of the larger batch."""
        budget = DraftBudget(COMPUTE_BOUND)
        for num_rows in [1] * 100 + [32] * 100:
            budget.observe_step(num_rows, num_rows, float(COMPUTE_BOUND(num_rows)) + 1.0, 0.0)
        assert budget._beyond.per_row == pytest.approx(1 / 32, rel=0.05)

    def test_what_drafted_tokens_take_is_laid_to_them(self) -> None:
        """Where it goes with their number; else to the rows."""
        rng = np.random.default_rng(0)
        for per_row, per_draft in [(0.5, 0.0), (0.2, 0.3), (0.0, 0.0)]:
            budget = DraftBudget(COMPUTE_BOUND)
            for _ in range(400):
                num_rows, num_drafted = rng.integers(4, 9), rng.integers(0, 8)
                seconds = float(COMPUTE_BOUND(num_rows + num_drafted)) + rng.normal(0, 0.05)
                seconds += per_row * num_rows + per_draft * num_drafted
                budget.observe_step(num_rows, num_rows + num_drafted, seconds, 0.0)
            assert budget._beyond.per_row == pytest.approx(per_row, abs=0.1)
            assert budget._beyond.per_draft == pytest.approx(per_draft, abs=0.1)

    def test_drafts_that_take_more_than_measured_become_fewer(self) -> None:
        times = StepTimes((1, 64), (10.0, 14.0))
        few, many = (taught(times, [True, True, False], 1) for _ in range(2))
        for num_drafted in [0, 8] * 50:
            measured = float(times(4 + num_drafted))
            many.observe_step(4, 4 + num_drafted, measured, 0.0)
            few.observe_step(4, 4 + num_drafted, measured + 2.0 * num_drafted, 0.0)
        assert sum(few.choose(self.ROWS, 0, 1)) < sum(many.choose(self.ROWS, 0, 1))

    @staticmethod
    def steps_until(budget: DraftBudget, rows: Sequence[Candidate], *, paused: bool) -> int:
        for num_steps in range(1000):
            if budget.is_paused == paused:
                return num_steps
            if not budget.is_paused:
                budget.choose(rows, 0, 1)
            budget.observe_step(len(rows), len(rows), 1.0, 0.1)
        raise AssertionError("never")

    def test_proposing_that_gains_nothing_pauses_longer_and_longer(self) -> None:
        budget = DraftBudget(DEAR)  # No draft is worth its price.
        lengths = []
        for _ in range(6):
            assert self.steps_until(budget, self.ROWS, paused=True) == 8
            lengths.append(self.steps_until(budget, self.ROWS, paused=False))
        assert lengths == [16, 32, 64, 128, 256, 256]

    def test_drafts_that_gain_are_not_paused(self) -> None:
        budget = taught(FREE, [True], 1)
        with pytest.raises(AssertionError, match="never"):
            self.steps_until(budget, self.ROWS, paused=True)

    def test_gains_beside_prompts_do_not_count(self) -> None:
        """As what proposing takes there is not learned, either."""
        budget = taught(FREE, [True], 1)
        for _ in range(8):
            assert sum(budget.choose(self.ROWS, 5, 1)) > 0
            budget.observe_step(4, 4, 1.0, 0.1)
        assert budget.is_paused

    def test_a_pause_after_a_gain_is_short_again(self) -> None:
        budget, free = DraftBudget(DEAR), DraftBudget(FREE)
        for _ in range(3):
            self.steps_until(budget, self.ROWS, paused=True)
            self.steps_until(budget, self.ROWS, paused=False)
        budget._times = free._times
        for _ in range(8):
            budget.choose(self.ROWS, 0, 1)
            budget.observe_step(4, 4, 1.0, 0.1)
        budget._times = DEAR
        self.steps_until(budget, self.ROWS, paused=True)
        assert self.steps_until(budget, self.ROWS, paused=False) == 16


@dataclass
class Simulated:
    """A row on its way through a simulated job: its whole answer is known."""

    proposer: Proposer
    answer: list[int]
    num_done: int = 0


def simulate(
    texts: Sequence[tuple[list[int], list[int]]],
    num_rows: int,
    times: StepTimes,
    make: Callable[[], Proposer],
    length: int,
    budget: DraftBudget | None,
) -> float:
    """Seconds of a job of (prompt, answer) pairs, prefill aside."""
    waiting, rows, seconds = deque(texts), list[Simulated](), 0.0
    limit = max(len(answer) for _, answer in texts)
    while waiting or rows:
        while waiting and len(rows) < num_rows:
            prompt, answer = waiting.popleft()
            rows.append(Simulated(make(), answer))
            rows[-1].proposer.extend(prompt)
        drafts = [r.proposer.propose(min(length, len(r.answer))) for r in rows]
        lengths = [min(length, len(d.token_ids)) for d in drafts]
        if budget:
            candidates = [
                Candidate(d, limit - r.num_done) for r, d in zip(rows, drafts, strict=True)
            ]
            lengths = budget.choose(candidates, 0, len(waiting))
        seconds += float(times(len(rows) + sum(lengths)))
        for row, draft, n in zip(rows, drafts, lengths, strict=True):
            ahead = row.answer[row.num_done :]
            num_right = 0
            while (
                num_right < min(n, len(ahead) - 1)
                and draft.token_ids[num_right] == ahead[num_right]
            ):
                num_right += 1
            came = ahead[: num_right + 1]
            row.proposer.extend(came)
            row.num_done += len(came)
            if budget:
                budget.observe(draft, came, ended=len(came) == len(ahead) < limit)
        rows = [row for row in rows if row.num_done < len(row.answer)]
    return seconds


def make_texts(seed: int, repeats: float) -> list[tuple[list[int], list[int]]]:
    """Answers that copy stretches of what came before, or say something new, by chance."""
    rng = random.Random(seed)

    def text(length: int, before: list[int]) -> list[int]:
        made: list[int] = []
        while len(made) < length:
            known = before + made
            if known and rng.random() < repeats:
                start = rng.randrange(len(known))
                made += known[start : start + rng.randint(2, 20)]
            else:
                made.append(rng.randrange(300))
        return made[:length]

    prompts = [text(rng.randint(20, 60), []) for _ in range(40)]
    return [(prompt, text(rng.randint(20, 96), prompt)) for prompt in prompts]


@pytest.mark.parametrize("times", [MEMORY_BOUND, COMPUTE_BOUND, DEAR, FREE], ids=str)
@pytest.mark.parametrize("num_rows", [1, 4, 16])
@pytest.mark.parametrize("repeats", [0.05, 0.5])
def test_a_budget_does_not_lose_to_any_fixed_length(
    repeats: float, num_rows: int, times: StepTimes
) -> None:
    texts = make_texts(1, repeats)
    makers: list[Callable[[], Proposer]] = [
        lambda: NgramProposer(1, 3),
        lambda: SuffixProposer(SuffixAutomaton()),
    ]
    for make in makers:
        fixed = [simulate(texts, num_rows, times, NoProposer, 0, None)]
        fixed += [simulate(texts, num_rows, times, make, n, None) for n in (3, 5)]
        chosen = simulate(texts, num_rows, times, make, 5, DraftBudget(times))
        assert chosen < min(fixed) / 0.97


def test_a_budget_wins_somewhere() -> None:
    texts = make_texts(2, 0.5)
    plain = simulate(texts, 2, MEMORY_BOUND, NoProposer, 0, None)
    budget = DraftBudget(MEMORY_BOUND)
    chosen = simulate(texts, 2, MEMORY_BOUND, lambda: NgramProposer(1, 3), 5, budget)
    assert plain / chosen > 1.2
    assert np.isfinite(chosen)
