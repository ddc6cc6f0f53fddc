"""The loop and its cache: every request once, no write out of place, nothing stale read."""

from collections.abc import Iterator
from itertools import count, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import (
    PROPERTY,
    TINY,
    FakeTarget,
    make_engine,
    make_model,
    one_thread,  # noqa: F401
    scripted,
    scripted_logits,
)
from tests.mixing import VOCAB, mixed_answer, mixing_target, request
from workers.backend import KVCache, StepBatch
from workers.budget import DraftBudget
from workers.engine import Engine
from workers.ngram import NgramProposer
from workers.request import Request
from workers.step_times import StepTimes

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, VOCAB), max_size=12).map(tuple), st.integers(1, 9)),
    max_size=9,
)
SCHEDULES = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 4),
        "max_num_batched_tokens": st.integers(1, 9),
        "max_model_len": st.integers(2, 16),
        "num_spec_tokens": st.integers(0, 5),
    }
)


@PROPERTY
@given(PROMPTS, SCHEDULES, st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_every_request_gives_exactly_one_completion(
    prompts: list[tuple[tuple[int, ...], int]], schedule: dict[str, int], rights: list[int]
) -> None:
    """Empty, over-long and out-of-vocabulary (id 11) prompts among good ones."""
    max_len = schedule["max_model_len"]
    requests = [request(f"r{i}", *prompt) for i, prompt in enumerate(prompts)]
    expected = {}
    for r in requests:
        prompt = r.prompt_token_ids
        refused = not prompt or len(prompt) >= max_len or VOCAB in prompt
        room = min(r.params.max_tokens, max_len - len(prompt))
        expected[r.id] = None if refused else mixed_answer(prompt, room)
    target = mixing_target()
    known = {name: answer or [] for name, answer in expected.items()}
    engine = make_engine(target, scripted(known, rights, VOCAB), **schedule)
    completions = list(engine.generate(requests))
    assert sorted(c.request.id for c in completions) == sorted(expected)
    for completion in completions:
        answer = expected[completion.request.id]
        assert completion.finish_reason == ("error" if answer is None else "length")
        assert list(completion.token_ids) == (answer or [])
    assert not engine.has_work
    check_budget(target, schedule)


def check_budget(target: FakeTarget, schedule: dict[str, int]) -> None:
    """No pass holds more rows or tokens than it may."""
    for windows in target.passes:
        assert len(windows) <= schedule["max_num_seqs"]
        decoding = schedule["max_num_seqs"] * (1 + schedule["num_spec_tokens"])
        num_tokens = sum(len(tokens) for _, _, tokens in windows)
        assert num_tokens <= schedule["max_num_batched_tokens"] + decoding
    assert all(target.passes)


def test_windows_of_a_worked_example() -> None:
    """Prompt of 5 under a budget of 2, then K = 3 with drafts right 1, 3 and 0 times."""
    prompt, answer = (1, 2, 3, 4, 5), [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]
    target = FakeTarget(scripted_logits({prompt: answer}, 40), 40)
    engine = make_engine(
        target,
        scripted({"r": answer}, (1, 3, 0), 40),
        max_num_batched_tokens=2,
        max_model_len=15,
        num_spec_tokens=3,
    )
    (completion,) = engine.generate([request("r", prompt, 10)])
    assert list(completion.token_ids) == answer
    assert target.passes == [
        [(0, 0, (1, 2))],
        [(0, 2, (3, 4))],
        [(0, 4, (5,))],  # Gives 20.
        [(0, 5, (20, 21, 23, 24))],  # 21 accepted, 22 recovered: two tokens, rolled back by two.
        [(0, 7, (22, 23, 24, 25))],  # All accepted, 26 as the bonus.
        [(0, 11, (26, 28, 29))],  # 3 tokens are left, so 2 are drafted: wrong, 27 recovered.
        [(0, 12, (27, 28))],  # Room for 1 draft. The script starts over: right, 29 as the bonus.
    ]


@pytest.mark.parametrize("num_spec_tokens", [1, 3, 7])
def test_a_row_is_filled_to_its_last_position_and_no_further(num_spec_tokens: int) -> None:
    """FakeTarget refuses a write at 12; the newest token of an answer is never written."""
    prompt = (1, 2, 3)
    target = mixing_target()
    proposers = scripted({"r": mixed_answer(prompt, 20)}, (99,), VOCAB)
    engine = make_engine(target, proposers, max_model_len=12, num_spec_tokens=num_spec_tokens)
    (completion,) = engine.generate([request("r", prompt, 50)])
    assert list(completion.token_ids) == mixed_answer(prompt, 9)
    last = max(first + len(tokens) for windows in target.passes for _, first, tokens in windows)
    assert last == 11


def test_rows_without_a_draft_stand_between_rows_with_one() -> None:
    """Ragged windows in one pass: lengths must not move from row to row."""
    prompts = {f"r{i}": (i, 7, i) for i in range(4)}
    answers = {name: mixed_answer(prompt, 8) for name, prompt in prompts.items()}

    def factory(r: Request) -> Any:
        drafting = r.id in ("r1", "r3")
        return scripted(answers, (9,), VOCAB, None if drafting else (0,))(r)

    target = mixing_target()
    engine = make_engine(target, factory, num_spec_tokens=3)
    completions = {
        c.request.id: c
        for c in engine.generate(request(name, prompt, 8) for name, prompt in prompts.items())
    }
    assert [len(tokens) for _, _, tokens in target.passes[1]] == [1, 4, 1, 4]
    for name, answer in answers.items():
        assert list(completions[name].token_ids) == answer
        drafted = completions[name].stats.num_draft_tokens
        assert drafted == (0 if name in ("r0", "r2") else 5)  # 3, then room for 8 - 5 - 1 = 2.


def test_requests_are_pulled_lazily() -> None:
    pulled = []

    def endless() -> Iterator[Request]:
        for i in count():
            pulled.append(i)
            yield request(f"r{i}", (1 + i % 3,), 2 + i % 4)

    engine = make_engine(mixing_target(), max_num_seqs=3)
    stream = engine.generate(endless())
    assert pulled == []
    for num_done in range(1, 40):
        next(stream)
        # At most the rows, fewer than a batch waiting, and what is queued at once.
        assert len(pulled) <= num_done + 2 * 3 + 256
    assert len(pulled) >= 40


def test_slots_are_refilled_while_others_run() -> None:
    """A short row's slot serves the next request before the long row is done."""
    target = mixing_target()
    engine = make_engine(target, max_num_seqs=2)
    requests = [request("long", (1,), 12), *(request(f"short{i}", (2,), 3) for i in range(4))]
    order = [c.request.id for c in engine.generate(requests)]
    assert order == ["short0", "short1", "short2", "long", "short3"]  # Both in the twelfth pass.
    assert len(target.passes) == 12


def test_generate_finishes_what_was_added_before() -> None:
    engine = make_engine(mixing_target(), max_num_seqs=1)
    for i in range(4):
        engine.add([request(f"r{i}", (1,), 2)])
    assert (engine.num_waiting, engine.has_work) == (4, True)
    names = [c.request.id for c in engine.generate([request("r4", (1,), 2)])]
    assert names == ["r0", "r1", "r2", "r3", "r4"]
    assert (engine.num_waiting, engine.has_work) == (0, False)


def test_an_engine_without_work() -> None:
    engine = make_engine(mixing_target())
    assert list(engine.generate([])) == []
    assert engine.step() == []
    assert not engine.has_work


def test_steps_by_hand_and_cache_size() -> None:
    engine = make_engine(mixing_target(), max_num_seqs=1)
    engine.add([request("a", (1,), 1)])
    engine.add([request("b", (1,), 1)])
    assert [c.request.id for c in engine.step()] == ["a"]
    assert [c.request.id for c in engine.step()] == ["b"]
    tiny = make_engine(make_model("float64"), max_num_seqs=3, max_model_len=10)
    # Keys and values: layers * rows * heads * positions * head size * 8 bytes.
    assert tiny.cache_nbytes == 2 * TINY.num_layers * 3 * TINY.num_kv_heads * 10 * TINY.head_dim * 8


def test_completions_carry_their_request_and_time() -> None:
    r = request("a", (1,), 3)
    (completion,) = make_engine(mixing_target()).generate([r])
    assert completion.request is r
    assert completion.seconds > 0


def fresh_prefill(token_ids: list[int]) -> KVCache:
    """The cache of one row that holds the tokens, computed in a single pass."""
    model, length = make_model("float64"), len(token_ids)
    cache = model.new_cache(1, length)
    batch = StepBatch(
        torch.tensor(token_ids),
        torch.zeros(length, dtype=torch.int64),
        torch.arange(length),
        torch.tensor([length - 1]),
    )
    with torch.inference_mode():
        model.forward(batch, cache)
    return cache


def check_cache(engine: Engine) -> int:
    """Compare what every row has committed to the cache with a prefill; how many tokens that is."""
    num_compared = 0
    for row in engine._rows:
        if not (length := row.num_cached):
            continue
        assert length <= len(row.token_ids)
        expected = fresh_prefill(row.token_ids[:length])
        for mine, theirs in [
            (engine._cache.keys, expected.keys),
            (engine._cache.values, expected.values),
        ]:
            torch.testing.assert_close(
                mine[:, row.slot, :, :length], theirs[:, 0], rtol=1e-9, atol=1e-9
            )
        num_compared += length
    return num_compared


def check_slots(engine: Engine, num_slots: int) -> None:
    """Each slot is free or has one row, never both."""
    slots = [row.slot for row in engine._rows] + engine._free_slots
    assert sorted(slots) == list(range(num_slots))


@settings(PROPERTY, max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), min_size=1, max_size=14).map(tuple), st.integers(1, 9)
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 3),
    st.integers(1, 10),
    st.integers(0, 4),
)
def test_committed_cache_equals_a_fresh_prefill(
    prompts: list[tuple[tuple[int, ...], int]], max_num_seqs: int, budget: int, num_spec: int
) -> None:
    engine = make_engine(
        make_model("float64"),
        lambda _request: NgramProposer(1, 2),
        max_num_seqs,
        budget,
        max_model_len=18,
        num_spec_tokens=num_spec,
    )
    for i, prompt in enumerate(prompts):
        engine.add([request(f"r{i}", *prompt)])
    num_done = 0
    while engine.has_work:
        num_done += len(engine.step())
        check_slots(engine, max_num_seqs)
        check_cache(engine)
    assert num_done == len(prompts)


def test_the_cache_check_sees_rejected_drafts() -> None:
    """The same by a fixed schedule in which drafts are accepted and rejected: it compares something."""
    prompt = (5, 9, 17) * 4
    engine = make_engine(make_model("float64"), num_spec_tokens=0, max_model_len=40)
    (plain,) = engine.generate([request("r", prompt, 20)])
    proposers = scripted({"r": plain.token_ids}, (2, 0, 3), TINY.vocab_size)
    engine = make_engine(make_model("float64"), proposers, max_model_len=40, num_spec_tokens=3)
    engine.add([request("r", prompt, 20)])
    lengths, completions = [], []
    while engine.has_work:
        completions += engine.step()
        lengths.append(check_cache(engine))
    assert completions[0].token_ids == plain.token_ids
    stats = completions[0].stats
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert lengths[0] == 12
    assert all(later > earlier for earlier, later in pairwise(lengths[:-1]))


def test_a_paused_budget_asks_for_no_drafts() -> None:
    prompts = {f"r{i}": (i, 2, 3) for i in range(3)}
    answers = {name: mixed_answer(prompt, 20) for name, prompt in prompts.items()}
    budget = DraftBudget(StepTimes((1, 64), (1.0, 1.0)))
    for num_paused in (0, 10**6):
        budget._num_paused = num_paused
        engine = make_engine(
            mixing_target(), scripted(answers, [99], VOCAB), num_spec_tokens=3, budget=budget
        )
        completions = list(engine.generate(request(*item, 20) for item in prompts.items()))
        assert {c.request.id: list(c.token_ids) for c in completions} == answers
        num_drafted = sum(c.stats.num_draft_tokens for c in completions)
        assert (num_drafted == 0) == bool(num_paused)
    assert budget._num_paused == 10**6 - 19  # Of 20 passes, the first is the prompts'.
