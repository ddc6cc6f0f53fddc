"""Acceptance by table, the counts by hand, and the invariants of the counts over random scripts."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import PROPERTY, ByteDetokenizer, run_script
from workers.acceptance import Acceptance, accept
from workers.config import SamplingParams
from workers.stats import AcceptanceStats
from workers.stopping import End, StopChecker

EOS, STOP = 2, 3

# draft, what the target says at each position, accepted tokens, how many of them were drafted.
TABLE: dict[str, tuple[list[int], list[int], tuple[int, ...], int]] = {
    "all accepted, then the bonus token": ([5, 6, 7], [5, 6, 7, 8], (5, 6, 7, 8), 3),
    "none accepted": ([5, 6, 7], [9], (9,), 0),
    "first wrong, the others right again": ([5, 6, 7], [9, 6, 7, 8], (9,), 0),
    "middle wrong, the last right again": ([5, 6, 7], [5, 9, 7, 8], (5, 9), 1),
    "last wrong": ([5, 6, 7], [5, 6, 9], (5, 6, 9), 2),
    "empty draft": ([], [5], (5,), 0),
    "one token, wrong": ([5], [6], (6,), 0),
    "one token, right": ([5], [5, 6], (5, 6), 1),
    "the same token over and over": ([5, 5, 5], [5, 5, 6], (5, 5, 6), 2),
    "EOS inside the draft": ([5, EOS, 7, 8], [5, EOS, 7, 8, 9], (5, EOS), 2),
    "EOS first in the draft": ([EOS, 6], [EOS, 6, 7], (EOS,), 1),
    "EOS as the last accepted token": ([5, 6, EOS], [5, 6, EOS, 7], (5, 6, EOS), 3),
    "EOS as the recovered token": ([5, 6, 7], [5, EOS], (5, EOS), 1),
    "EOS as the bonus token": ([5, 6], [5, 6, EOS], (5, 6, EOS), 2),
    "EOS drafted but not meant": ([5, EOS, 7], [5, 6, 7, 8], (5, 6), 1),
}


def walk(draft: Sequence[int], target: Sequence[int]) -> tuple[Acceptance, list[int], list[int]]:
    """Run accept; also the positions it asked for and the tokens it reported, in order."""
    asked: list[int] = []
    told: list[int] = []

    def next_token(j: int) -> int:
        asked.append(j)
        return target[j]

    def ends(token_id: int) -> bool:
        told.append(token_id)
        return token_id == EOS

    return accept(draft, next_token, ends), asked, told


@pytest.mark.parametrize("case", TABLE)
def test_table(case: str) -> None:
    draft, target, token_ids, num_accepted = TABLE[case]
    acceptance, asked, told = walk(draft, target)
    assert acceptance == Acceptance(token_ids, num_accepted)
    # Asked in order, never past the first rejection or the end; told exactly what is emitted.
    assert asked == list(range(len(token_ids)))
    assert tuple(told) == token_ids


@PROPERTY
@given(st.lists(st.integers(2, 6), max_size=7), st.lists(st.integers(2, 6), min_size=8, max_size=8))
def test_what_is_emitted_is_what_the_target_says(draft: list[int], target: list[int]) -> None:
    acceptance, asked, _ = walk(draft, target)
    emitted = list(acceptance.token_ids)
    assert emitted == target[: len(emitted)]
    assert 1 <= len(emitted) <= len(draft) + 1
    assert EOS not in emitted[:-1]
    assert asked == list(range(len(emitted)))
    assert emitted[: acceptance.num_accepted] == draft[: acceptance.num_accepted]
    assert len(emitted) - acceptance.num_accepted in (0, 1)
    if len(emitted) == acceptance.num_accepted:
        assert emitted[-1] == EOS


def checked(
    draft: list[int], cap: int, stop_token_ids: tuple[int, ...] = (STOP,)
) -> tuple[Acceptance, End | None]:
    """Accept a draft that is right throughout, under a StopChecker with a cap on the tokens."""
    params = SamplingParams(max_tokens=cap, stop_token_ids=stop_token_ids)
    checker = StopChecker(params, (EOS,), ByteDetokenizer(), cap)
    ends: list[End | None] = []

    def told(token_id: int) -> bool:
        ends.append(checker.check(token_id))
        return ends[-1] is not None

    return accept(draft, lambda j: [*draft, 99][j], told), ends[-1]


def test_stop_inside_a_block_that_reaches_past_the_cap() -> None:
    acceptance, end = checked([10, 11, STOP, 20, 21, 22], cap=5)
    assert acceptance == Acceptance((10, 11, STOP), 3)
    assert end == End("stop", STOP)


def test_stop_past_the_cap_does_not_count() -> None:
    acceptance, end = checked([10, 11, 12, 13, 14, STOP, 20], cap=5)
    assert acceptance == Acceptance((10, 11, 12, 13, 14), 5)
    assert end == End("length")


def test_stop_at_the_cap_counts() -> None:
    acceptance, end = checked([10, 11, 12, 13, STOP, 20], cap=5)
    assert acceptance == Acceptance((10, 11, 12, 13, STOP), 5)
    assert end == End("stop", STOP)


@pytest.mark.parametrize("num_spec_tokens", [0, 1, 3, 5, 7])
@pytest.mark.parametrize(
    ("answer", "token_ids", "reason", "stop_reason"),
    [
        ([10, 11, STOP, 20, 21, 22], (10, 11, STOP), "stop", STOP),
        ([10, 11, 12, 13, STOP, 20], (10, 11, 12, 13, STOP), "stop", STOP),
        ([10, 11, 12, 13, 14, STOP], (10, 11, 12, 13, 14), "length", None),
        ([10, 256, 12, 13, STOP], (10, 256), "stop", None),
        ([10, 11, 12, 13, 14, 256], (10, 11, 12, 13, 14), "length", None),
        ([256, 256, 256], (256,), "stop", None),
    ],
)
def test_engine_ends_a_drafted_answer_where_plain_decoding_does(
    answer: list[int],
    token_ids: tuple[int, ...],
    reason: str,
    stop_reason: int | None,
    num_spec_tokens: int,
) -> None:
    params = SamplingParams(max_tokens=5, stop_token_ids=(STOP,), logprobs=0)
    completion = run_script(answer, params, num_spec_tokens)
    assert completion.token_ids == token_ids
    assert completion.finish_reason == reason
    assert completion.stop_reason == stop_reason
    assert completion.logprobs is not None
    assert tuple(entry.token_id for entry in completion.logprobs) == token_ids


def test_counts_of_a_worked_example() -> None:
    """Answer of 12 tokens, K = 3, drafts right 3, 0, 2 and 1 times.

    pass     drafted  accepted  emitted    answer so far
    prefill  -        -         1          1
    1        3        3         4          5
    2        3        0         1          6
    3        3        2         3          9
    4        2        1         2          11   (2: room for 12 - 9 - 1)
    5        -        -         1          12   (no room for a draft)
    """
    completion = run_script(
        list(range(20, 32)), SamplingParams(max_tokens=12), 3, rights=(3, 0, 2, 1)
    )
    stats = completion.stats
    assert completion.token_ids == tuple(range(20, 32))
    assert stats == AcceptanceStats(num_steps=6, num_draft_tokens=11, histogram=(1, 1, 1, 1))
    assert stats.num_spec_steps == 4
    assert stats.num_accepted_draft_tokens == 6
    assert len(completion.token_ids) == 6 + 6
    assert stats.mean_acceptance_length == 2.5
    assert stats.draft_acceptance_rate == pytest.approx(6 / 11)


def test_counts_when_a_stop_cuts_a_block() -> None:
    """Prefill emits 1; a draft of 4 is right, but its second token is EOS: 2 accepted, no bonus."""
    completion = run_script([20, 21, 256, 23, 24, 25], SamplingParams(max_tokens=20), 4)
    assert completion.token_ids == (20, 21, 256)
    assert completion.stats == AcceptanceStats(2, 4, (0, 0, 1, 0, 0))
    # 3 tokens = 2 steps + 2 accepted - 1 cut (the token that EOS kept from being drawn).


def test_tokens_after_a_rejection_are_not_counted() -> None:
    """One draft of 3 with only its middle token wrong: 1 accepted, not 2."""
    answer = [20, 21, 22, 23, 24]
    completion = run_script(answer, SamplingParams(max_tokens=5), 3, rights=(1,), lengths=(3, 0))
    # Drafts: [21, wrong, wrong]; then none: 1 + 2 + 1 + ... tokens.
    assert completion.token_ids == tuple(answer)
    assert completion.stats == AcceptanceStats(4, 3, (0, 1, 0, 0))


def test_counts_without_drafts() -> None:
    stats = run_script([20, 21, 22], SamplingParams(max_tokens=3), 0).stats
    assert stats == AcceptanceStats(num_steps=3, num_draft_tokens=0, histogram=())
    assert stats.num_spec_steps == stats.num_accepted_draft_tokens == 0
    assert stats.mean_acceptance_length is None
    assert stats.draft_acceptance_rate is None


def test_steps_with_an_empty_draft_are_no_spec_steps() -> None:
    completion = run_script(list(range(20, 28)), SamplingParams(max_tokens=8), 2, lengths=(0, 2))
    # 1 (prefill), 1 (empty draft), 3 (2 accepted + bonus), 1 (empty), 2 (room for 1) tokens.
    assert completion.stats == AcceptanceStats(5, 3, (0, 1, 1))


def test_stats_add_up() -> None:
    first, second = AcceptanceStats(4, 6, (1, 0, 2)), AcceptanceStats(3, 5, (0, 1, 0, 0, 1))
    assert first + second == AcceptanceStats(7, 11, (1, 1, 2, 0, 1))
    assert first + AcceptanceStats() == AcceptanceStats() + first == first
    third = AcceptanceStats(1)
    assert (first + second) + third == first + (second + third)
    # The ratio of sums: (4 + 5) / (3 + 2) + 1, not the mean of 1 + 4/3 and 1 + 5/2.
    assert (first + second).mean_acceptance_length == 1 + 9 / 5


@PROPERTY
@given(
    answer=st.lists(st.sampled_from([20, 21, 22, 23, 24, 25, 26, 256]), min_size=12, max_size=12),
    max_tokens=st.integers(1, 12),
    num_spec_tokens=st.integers(0, 7),
    rights=st.lists(st.integers(0, 8), min_size=1, max_size=6),
    lengths=st.lists(st.integers(0, 8), min_size=6, max_size=6),
)
def test_invariants_of_the_counts(
    answer: list[int],
    max_tokens: int,
    num_spec_tokens: int,
    rights: list[int],
    lengths: list[int],
) -> None:
    completion = run_script(
        answer,
        SamplingParams(max_tokens=max_tokens),
        num_spec_tokens,
        rights=rights,
        lengths=lengths,
    )
    stats = completion.stats
    wanted = answer[:max_tokens]
    if 256 in wanted:
        wanted = wanted[: wanted.index(256) + 1]
    assert list(completion.token_ids) == wanted
    # Replay the walk with nothing but lengths.
    steps, at = [(0, 0)], 1
    cut = 0
    for n in range(len(wanted)):
        if at >= len(wanted):
            break
        drafted = min(num_spec_tokens, max_tokens - at - 1)
        if drafted > 0:
            # A proposer without room is not asked, so the n-th draft is the n-th step with room.
            drafted = min(drafted, lengths[n % len(lengths)])
        accepted = min(rights[n % len(rights)], drafted, len(wanted) - at)
        steps.append((drafted, accepted))
        cut += at + accepted == len(wanted)  # The last token was a drafted one: no bonus token.
        at += accepted + (at + accepted < len(wanted))
    assert stats.num_steps == len(steps)
    assert stats.num_draft_tokens == sum(drafted for drafted, _ in steps)
    assert stats.num_accepted_draft_tokens == sum(accepted for _, accepted in steps)
    assert stats.num_spec_steps == sum(drafted > 0 for drafted, _ in steps)
    assert len(wanted) == stats.num_steps + stats.num_accepted_draft_tokens - cut
    assert sum(stats.histogram) == stats.num_spec_steps <= stats.num_steps
    assert stats.num_accepted_draft_tokens <= stats.num_draft_tokens
    assert len(stats.histogram) == (num_spec_tokens + 1 if num_spec_tokens else 0)
