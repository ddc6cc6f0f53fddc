"""Prompt lookup by hand."""

import pytest

from tests.fakes import FakeTarget, make_engine, scripted_logits
from workers.build import build_proposer
from workers.config import EngineConfig, SamplingParams
from workers.ngram import NgramProposer
from workers.proposer import Confidence, Draft, NoProposer
from workers.request import Request
from workers.stats import AcceptanceStats


def draft(tokens: list[int], max_tokens: int, min_n: int = 1, max_n: int = 3) -> tuple[int, ...]:
    proposer = NgramProposer(min_n, max_n)
    proposer.extend(tokens)
    return proposer.propose(max_tokens).token_ids


def test_copies_what_followed() -> None:
    assert draft([1, 2, 3, 4, 5, 9, 1, 2, 3], 2) == (4, 5)


def test_longest_match_wins_over_a_later_shorter_one() -> None:
    # The last three tokens 1 2 3 were followed by 4; 3 alone was last followed by 8.
    assert draft([1, 2, 3, 4, 7, 3, 8, 1, 2, 3], 1) == (4,)
    # With n = 1 only, the latest 3 decides.
    assert draft([1, 2, 3, 4, 7, 3, 8, 1, 2, 3], 1, max_n=1) == (8,)


def test_two_tokens_match_where_three_do_not() -> None:
    assert draft([5, 2, 3, 4, 9, 3, 8, 6, 2, 3], 2) == (4, 9)


def test_latest_occurrence_wins() -> None:
    assert draft([1, 2, 7, 1, 2, 8, 1, 2, 9, 1, 2], 1) == (9,)


def test_the_rows_own_end_is_no_match() -> None:
    assert draft([1, 2, 3], 4) == ()
    assert draft([1], 4) == ()


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 1, 2], (1, 2, 1, 2, 1)),
        ([4, 1, 2, 3, 1, 2, 3], (1, 2, 3, 1, 2)),
        ([9, 9], (9, 9, 9, 9, 9)),
        ([5, 6, 7, 5], (6, 7, 5, 6, 7)),
    ],
)
def test_a_copy_that_runs_into_itself_goes_on_in_the_loop(
    tokens: list[int], expected: tuple[int, ...]
) -> None:
    assert draft(tokens, 5) == expected


def test_a_word_repeated_48_times() -> None:
    for max_tokens in (1, 3, 7, 64):
        assert draft([7] * 48, max_tokens) == (7,) * max_tokens


def test_min_and_max_n() -> None:
    tokens = [1, 2, 3, 4, 9, 8, 3]  # Only the single token 3 occurs before.
    assert draft(tokens, 2) == (4, 9)
    assert draft(tokens, 2, min_n=2) == ()
    # 1 2 3 4 is followed by 5 and 3 4, later, by 6: max_n decides which is seen.
    tokens = [1, 2, 3, 4, 5, 3, 4, 6, 1, 2, 3, 4]
    assert draft(tokens, 1, max_n=4) == (5,)
    assert draft(tokens, 1, max_n=2) == (6,)


def test_never_more_than_asked() -> None:
    for max_tokens in range(1, 9):
        assert len(draft([1, 2, 3, 4, 5, 6, 1, 2], max_tokens)) == max_tokens


def test_only_extend_moves_the_state() -> None:
    proposer = NgramProposer(1, 3)
    proposer.extend([1, 2, 3, 1, 2])
    assert [proposer.propose(2).token_ids for _ in range(3)] == [(3, 1)] * 3
    proposer.extend([4, 1, 2])  # 1 2 is now followed by 4 lately.
    assert proposer.propose(2).token_ids == (4, 1)
    proposer.extend([])
    assert proposer.propose(2).token_ids == (4, 1)
    proposer.extend([5, 5])
    assert proposer.propose(3).token_ids == (5, 5, 5)


def test_token_by_token_is_the_same_as_at_once() -> None:
    tokens = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]
    for end in range(1, len(tokens) + 1):
        proposer = NgramProposer(1, 3)
        for token_id in tokens[:end]:
            proposer.extend([token_id])
        assert proposer.propose(4).token_ids == draft(tokens[:end], 4)


def test_accepted_tokens_reach_the_proposer() -> None:
    """A target that repeats 50 51 52: nothing to copy for 4 tokens, then every draft is right.

    Passes give 1 1 1 1, then 3 + 1, 3 + 1 and, with room for 15 - 12 - 1 = 2 drafts, 2 + 1 tokens.
    """
    prompt, answer = (1, 2, 3), [50, 51, 52] * 6
    target = FakeTarget(scripted_logits({prompt: answer}, 60), 60)
    engine = make_engine(target, build_proposer(EngineConfig(proposer="ngram")), num_spec_tokens=3)
    (completion,) = engine.generate([Request("r", prompt, SamplingParams(max_tokens=15), seed=0)])
    assert list(completion.token_ids) == answer[:15]
    assert completion.stats == AcceptanceStats(7, 8, (0, 0, 1, 2))


def test_build_proposer() -> None:
    request = Request("r", (1,), SamplingParams(), seed=0)
    assert isinstance(build_proposer(EngineConfig(proposer="none"))(request), NoProposer)
    config = EngineConfig(proposer="ngram", prompt_lookup_min=2, prompt_lookup_max=2)
    first, second = (build_proposer(config)(request) for _ in range(2))
    first.extend([1, 2, 3, 1, 2])
    assert first.propose(1) == Draft((3,), (Confidence(2),))
    second.extend([1, 2])  # Rows share nothing.
    assert second.propose(1) == Draft()
    second.extend([3, 2])  # A single token is below prompt_lookup_min.
    assert second.propose(1) == Draft()


def test_no_proposer_drafts_nothing() -> None:
    proposer = NoProposer()
    proposer.extend([7] * 48)
    assert proposer.propose(5) == Draft()
