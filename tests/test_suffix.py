"""The suffix automaton against all substrings, and drafts by hand."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import PROPERTY
from workers.config import SamplingParams
from workers.proposer import Confidence, Draft
from workers.request import Request
from workers.suffix import SuffixAutomaton, SuffixPool, SuffixProposer

REQUEST = Request("r", (1,), SamplingParams(), seed=0)


def draft(tokens: list[int], max_tokens: int) -> Draft:
    proposer = SuffixProposer(SuffixAutomaton())
    proposer.extend(tokens)
    return proposer.propose(max_tokens)


def substrings(texts: list[list[int]]) -> Counter[tuple[int, ...]]:
    return Counter(
        tuple(text[start:end])
        for text in texts
        for start in range(len(text))
        for end in range(start + 1, len(text) + 1)
    )


@PROPERTY
@given(
    st.integers(1, 4).flatmap(
        lambda size: st.lists(
            st.tuples(st.integers(0, 2), st.integers(0, size - 1)), min_size=1, max_size=32
        )
    )
)
def test_the_automaton_holds_every_substring_as_often_as_it_occurs(
    steps: list[tuple[int, int]],
) -> None:
    """Three texts that grow in turns."""
    automaton, texts, ends = SuffixAutomaton(), [[], [], []], [0, 0, 0]  # type: ignore[var-annotated]
    for text, token_id in steps:
        ends[text] = automaton.extend(ends[text], token_id)
        texts[text].append(token_id)
    found = {}
    reached: list[tuple[tuple[int, ...], int]] = [((), 0)]
    while reached:
        string, state = reached.pop()
        for token_id, after in automaton.next[state].items():
            found[(*string, token_id)] = automaton.count[after]
            reached.append(((*string, token_id), after))
    assert found == substrings(texts)
    for text, end in zip(texts, ends, strict=True):
        assert automaton.length[end] == len(text)


@PROPERTY
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 6))
def test_drafts_follow_the_longest_suffix_seen_before(tokens: list[int], max_tokens: int) -> None:
    drafted = draft(tokens, max_tokens)
    counts = substrings([tokens])
    text = list(tokens)
    for token_id, confidence in zip(drafted.token_ids, drafted.confidences, strict=True):
        suffixes = [tuple(text[start:]) for start in range(len(text))]
        ahead = {s: {t: counts[(*s, t)] for t in range(3) if (*s, t) in counts} for s in suffixes}
        longest = next(s for s in suffixes if ahead[s])
        assert confidence.match_length == len(longest)
        most = max(ahead[longest].values())
        assert ahead[longest][token_id] == most
        assert confidence.share == pytest.approx(most / sum(ahead[longest].values()))
        text.append(token_id)
    if len(drafted.token_ids) < max_tokens:  # Nothing that ends here was seen before.
        assert not any((text[-1], t) in counts for t in range(3))


def test_what_came_most_often_wins_and_of_equals_the_latest() -> None:
    assert draft([1, 2, 9, 1, 3, 8, 1, 2, 7, 1], 1) == Draft((2,), (Confidence(1, 2 / 3),))
    assert draft([1, 2, 9, 1, 3, 8, 1], 1) == Draft((3,), (Confidence(1, 0.5),))


def test_a_longer_match_wins_over_a_more_frequent_one() -> None:
    assert draft([7, 1, 2, 1, 3, 1, 3, 7, 1], 1) == Draft((2,), (Confidence(2),))


def test_a_loop_is_drafted_as_far_as_asked() -> None:
    assert draft([5, 1, 2, 1, 2], 6).token_ids == (1, 2, 1, 2, 1, 2)
    assert draft([7] * 48, 64).token_ids == (7,) * 64


def test_nothing_seen_nothing_drafted() -> None:
    assert draft([1, 2, 3], 4) == Draft()
    assert draft([1], 4) == Draft()


def test_of_many_continuations_the_latest_is_taken() -> None:
    tokens = [t for i in range(100, 130) for t in (1, i)] + [1, 200, 9, 1]
    assert draft(tokens, 1) == Draft((200,), (Confidence(1, 1 / 32),))


def test_a_long_repetitive_text_is_fast_and_stays_right() -> None:
    """More suffixes occur again than are counted."""
    tokens = [7] * 400 + [8] + [7] * 399
    drafted = draft(tokens, 3)
    # 399 sevens were followed by a seven once, and then, latest, by the eight.
    assert drafted.token_ids == (8, 7, 7)
    for length in (1, 2, 150):
        assert draft([*tokens, 9, *[7] * length], 1).token_ids == (7,)


def test_rows_of_a_pool_draft_from_each_other() -> None:
    pool = SuffixPool(max_tokens=100)
    first, second = pool.new_proposer(REQUEST), pool.new_proposer(REQUEST)
    first.extend([1, 2, 3])
    second.extend([1, 2])
    assert second.propose(3).token_ids == (3,)
    first.extend([4, 5])
    assert second.propose(3).token_ids == (3, 4, 5)
    # No text runs into the next one.
    third = pool.new_proposer(REQUEST)
    third.extend([5])
    assert third.propose(2) == Draft()


def test_a_full_pool_is_begun_anew_and_its_rows_go_on() -> None:
    pool = SuffixPool(max_tokens=4)
    old = pool.new_proposer(REQUEST)
    old.extend([1, 2, 3, 1])
    new = pool.new_proposer(REQUEST)
    new.extend([1])
    assert new.propose(1) == Draft()
    assert old.propose(1).token_ids == (2,)


def test_without_a_pool_rows_share_nothing() -> None:
    pool = SuffixPool(max_tokens=0)
    first, second = pool.new_proposer(REQUEST), pool.new_proposer(REQUEST)
    first.extend([1, 2, 3])
    second.extend([1, 2])
    assert second.propose(1) == Draft()
