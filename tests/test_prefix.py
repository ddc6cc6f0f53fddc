"""Prefix caching: a beginning that rows share is computed once, and changes no token."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

import workers.prefix
from tests.fakes import (
    PROPERTY,
    FakeTarget,
    make_engine,
    make_model,
    make_requests,
    one_thread,  # noqa: F401
    scripted,
)
from tests.mixing import VOCAB, mixed, mixed_answer, mixing_target, request
from workers.request import Request

pytestmark = pytest.mark.usefixtures("one_thread")

SYSTEM = tuple(i % 7 for i in range(20))


def windows(target: FakeTarget) -> list[list[tuple[int, int, int]]]:
    """(row, first position, number of tokens) of every pass."""
    return [[(row, first, len(tokens)) for row, first, tokens in step] for step in target.passes]


def test_rows_wait_for_the_first_to_compute_what_they_share() -> None:
    target = mixing_target()
    prompts = [(*SYSTEM, 8, 9), (*SYSTEM, 9), SYSTEM, (1, 2, 3)]
    completions = {
        c.request.id: list(c.token_ids)
        for c in make_engine(target).generate(
            request(f"r{i}", prompt) for i, prompt in enumerate(prompts)
        )
    }
    assert windows(target)[:2] == [
        [(0, 0, 22), (3, 0, 3)],  # Nothing in common worth waiting for: the last starts at once.
        # Of a prompt that is known whole, the last token is computed anyway: its logits are needed.
        [(0, 22, 1), (3, 3, 1), (1, 20, 1), (2, 19, 1)],
    ]
    assert completions == {f"r{i}": mixed_answer(prompt, 3) for i, prompt in enumerate(prompts)}


def test_a_long_beginning_is_waited_for_over_several_passes() -> None:
    target = mixing_target()
    engine = make_engine(target, max_num_seqs=2, max_num_batched_tokens=8)
    assert len(list(engine.generate([request("a", SYSTEM), request("b", (*SYSTEM[:-1], 6))]))) == 2
    assert windows(target)[:4] == [
        [(0, 0, 8)],
        [(0, 8, 8)],  # Four more to come are not worth a wait any longer.
        [(0, 16, 4), (1, 16, 4)],
        [(0, 20, 1), (1, 20, 1)],
    ]


def test_what_a_finished_row_left_is_used_where_it_lies() -> None:
    """One slot: a dialogue goes on, and finds its earlier turn, answer included, in place."""
    target = mixing_target()
    engine = make_engine(target, max_num_seqs=1)
    (first,) = engine.generate([request("a", SYSTEM, 5)])
    longer = (*SYSTEM, *first.token_ids, 3, 3)
    (second,) = engine.generate([request("b", longer, 2)])
    assert list(second.token_ids) == mixed_answer(longer, 2)
    # 20 + 5 tokens, of which the newest was never written.
    assert windows(target)[5][0] == (0, 24, 3)


def test_a_failed_row_leaves_nothing_to_others() -> None:
    """The row that computes the beginning breaks; those that wait compute it themselves."""

    def logits(history: Sequence[int]) -> list[float]:
        broken = history[:21] == (*SYSTEM, 0)
        return [math.nan if broken else float(i == mixed(history)) for i in range(VOCAB)]

    target = FakeTarget(logits, VOCAB)
    engine = make_engine(target, max_num_seqs=3)
    prompts = [(*SYSTEM, 0), (*SYSTEM, 1), (*SYSTEM, 2)]
    completions = list(
        engine.generate(request(f"r{i}", prompt) for i, prompt in enumerate(prompts))
    )
    assert [c.finish_reason for c in completions] == ["error", "length", "length"]
    assert windows(target)[1] == [(1, 0, 21)]
    for completion, prompt in zip(completions[1:], prompts[1:], strict=True):
        assert list(completion.token_ids) == mixed_answer(prompt, 3)


FAMILIES = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 14), st.lists(st.integers(0, 2), max_size=4)),
    min_size=1,
    max_size=9,
)


@PROPERTY
@given(
    FAMILIES,
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(0, 3),
    st.integers(1, 6),
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
)
def test_no_token_changes(
    family: list[tuple[int, int, list[int]]],
    max_num_seqs: int,
    budget: int,
    num_spec_tokens: int,
    worth_waiting: int,
    rights: list[int],
) -> None:
    """Random prompts from two stems: the fake cache holds tokens, so a wrong copy would show."""
    stems = SYSTEM[:14], SYSTEM[3:17]
    prompts = {f"r{i}": (*stems[s][:n], *tail, 5) for i, (s, n, tail) in enumerate(family)}
    expected = {name: mixed_answer(prompt, 4) for name, prompt in prompts.items()}
    target = mixing_target()
    engine = make_engine(
        target,
        scripted(expected, rights, VOCAB),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        num_spec_tokens=num_spec_tokens,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers.prefix, "_WORTH_WAITING", worth_waiting)
        completions = list(engine.generate(request(n, p, 4) for n, p in prompts.items()))
    assert {c.request.id: list(c.token_ids) for c in completions} == expected


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_real_model_answers_alike(temperature: float) -> None:
    """Samples and continuations of one prompt, one slot and four, against a fresh engine for each."""
    model = make_model("w8a8")
    given = make_requests(temperature=temperature)
    longer = [
        Request(f"x{i}", (*given[0].prompt_token_ids, *range(i)), given[0].params, seed=i)
        for i in range(4)
    ]
    requests = [*given, *longer, *given]
    alone = [next(make_engine(model, max_num_seqs=1).generate([r])).token_ids for r in requests]
    for max_num_seqs in (1, 4):
        engine = make_engine(model, max_num_seqs=max_num_seqs)
        by_key = {(c.request.id, c.request.sample_idx): c for c in engine.generate(requests)}
        for r, tokens in zip(requests, alone, strict=True):
            assert by_key[r.id, r.sample_idx].token_ids == tokens
