"""The law of the drawn tokens, the keyed random numbers, the penalties and the log-probabilities.

Expected laws are enumerated here by independent code; Philox is written out from its paper.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch

from tests.fakes import FakeTarget, make_engine, scripted
from workers.acceptance import accept
from workers.config import SamplingParams
from workers.request import Completion, Request
from workers.sampling import (
    NonFiniteLogitsError,
    Sampler,
    StepLogits,
    TokenHistory,
    draw,
    filtered_probs,
    penalize_,
    uniform,
)

PROBS = [0.1, 0.4, 0.05, 0.3, 0.15]
LOGITS = np.log(PROBS)
# The 99.9 % points of chi-square for 1 to 4 degrees of freedom.
CHI_SQUARE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47}


def law(params: SamplingParams) -> list[float]:
    """What filtered_probs must give for LOGITS: plain loops over sets of token ids."""
    weights = [math.exp(value / params.temperature) for value in LOGITS]
    kept = {i for i in range(5) if weights[i] >= params.min_p * max(weights)}
    ranked = sorted(kept, key=lambda i: -weights[i])
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    mass, total, chosen = 0.0, sum(weights[i] for i in ranked), []
    for i in ranked:
        chosen.append(i)
        mass += weights[i]
        if mass >= params.top_p * total:
            break
    return [weights[i] / mass if i in chosen else 0.0 for i in range(5)]


def normalized(probs_V: np.ndarray) -> list[float]:
    return list(probs_V / probs_V.sum())


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.1, 0.4, 0.05, 0.3, 0.15]),
        ({"temperature": 0.5}, [1 / 28.5, 16 / 28.5, 0.25 / 28.5, 9 / 28.5, 2.25 / 28.5]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_k": -1}, [0.1, 0.4, 0.05, 0.3, 0.15]),
        ({"top_k": 9}, [0.1, 0.4, 0.05, 0.3, 0.15]),
        ({"top_p": 0.3}, [0, 1, 0, 0, 0]),
        ({"top_p": 0.5}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.8}, [0, 8 / 17, 0, 6 / 17, 3 / 17]),
        ({"min_p": 0.3}, [0, 8 / 17, 0, 6 / 17, 3 / 17]),  # 0.3 * 0.4 = 0.12.
        ({"min_p": 1.0}, [0, 1, 0, 0, 0]),
        # Temperature comes first: 9/16 and 2.25/16 of the likeliest.
        ({"temperature": 0.5, "min_p": 0.3}, [0, 16 / 25, 0, 9 / 25, 0]),
        # top-p of what top-k left: 0.7 of 0.85 suffices for 0.8; of 1 it would not.
        ({"top_k": 3, "top_p": 0.8}, [0, 4 / 7, 0, 3 / 7, 0]),
    ],
)
def test_filtered_probs_by_hand(params: dict[str, float], expected: list[float]) -> None:
    probs = filtered_probs(LOGITS, SamplingParams.model_validate({"temperature": 1.0, **params}))
    assert normalized(probs) == pytest.approx(expected, abs=1e-12)


def test_filtered_probs_of_every_combination() -> None:
    for temperature, top_k, top_p, min_p in product(
        (0.5, 1.0, 2.0), (0, 1, 2, 3, 4), (0.2, 0.65, 0.92, 1.0), (0.0, 0.2, 0.6)
    ):
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        assert normalized(filtered_probs(LOGITS, params)) == pytest.approx(law(params), abs=1e-12)


def test_ties() -> None:
    tied = np.log([0.2, 0.3, 0.2, 0.1, 0.2])
    kept = filtered_probs(tied, SamplingParams(temperature=1.0, top_k=2)) > 0
    assert kept.tolist() == [True, True, True, False, True]  # All that tie with the second.
    kept = filtered_probs(np.zeros(4), SamplingParams(temperature=1.0, top_p=0.5)) > 0
    assert kept.tolist() == [True, True, False, False]  # The earlier ids.


def test_top_p_of_a_large_flat_vocabulary() -> None:
    """3000 tokens of slowly falling weight, shuffled: more than the first partial sort holds."""
    rng = np.random.default_rng(0)
    logits = rng.permutation(np.arange(3000)) * -0.0005
    for top_p in (0.01, 0.3, 0.999):
        weights = sorted((math.exp(value) for value in logits), reverse=True)
        mass, count = 0.0, 0
        while mass < top_p * sum(weights):
            mass += weights[count]
            count += 1
        kept = filtered_probs(logits, SamplingParams(temperature=1.0, top_p=top_p)) > 0
        assert kept.sum() == count
        assert logits[kept].min() > logits[~kept].max()


def test_draw_at_its_edges() -> None:
    quarters = np.array([0.25, 0.25, 0.0, 0.5])
    below_one = 1 - 2.0**-53
    for u, token_id in [(0, 0), (0.2499, 0), (0.25, 1), (0.4999, 1), (0.5, 3), (below_one, 3)]:
        assert draw(quarters, u) == token_id
    # Tokens without mass are never drawn: neither first, nor last, nor when u * total rounds up.
    assert draw(np.array([0.0, 0.5, 0.5]), 0.0) == 1
    assert draw(np.array([0.5, 0.5, 0.0]), below_one) == 1
    assert draw(np.array([0.5, 0.5, 0.0]), 1.0) == 1
    assert draw(np.array([3.0, 1.0]), 0.7499) == 0  # Not normalized.
    assert draw(np.array([3.0, 1.0]), 0.75) == 1


def philox(counter: list[int], key: list[int]) -> int:
    """The first word of Philox4x64-10 (Salmon et al. 2011)."""
    mask = 2**64 - 1
    c, k = list(counter), list(key)
    for _ in range(10):
        high_0, low_0 = divmod(0xD2E7470EE14C6C93 * c[0], 2**64)
        high_1, low_1 = divmod(0xCA5A826395121157 * c[2], 2**64)
        c = [high_1 ^ c[1] ^ k[0], low_1, high_0 ^ c[3] ^ k[1], low_0]
        k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
    return c[0]


def test_uniform_is_philox() -> None:
    for seed, sample_idx, position in product((0, 1, 2**62 + 5, 2**63 - 1), (0, 3), (0, 1, 4095)):
        # numpy raises the counter before it draws.
        word = philox([position + 1, 0, 0, 0], [seed, sample_idx])
        assert uniform(seed, sample_idx, position) == (word >> 11) / 2**53


def test_uniform_is_pinned() -> None:
    """Answers of old runs repeat only while these stay."""
    assert uniform(0, 0, 0) == 0.011546754286331562
    assert uniform(7, 2, 31) == 0.9801301411509428
    assert uniform(2**63 - 1, 0, 1000) == 0.4539684746555662


def test_uniform_is_uniform_and_differs_by_every_part_of_its_key() -> None:
    keys = [*product(range(12), range(12), range(12))]
    values = [uniform(*key) for key in keys]
    assert len(set(values)) == len(keys)
    assert all(0 <= value < 1 for value in values)
    counts = Counter(int(value * 5) for value in values)
    chi_square = sum((counts[i] - len(keys) / 5) ** 2 / (len(keys) / 5) for i in range(5))
    assert chi_square < CHI_SQUARE[4]
    assert [uniform(*key) for key in keys] == values


def check_law(counts: Counter[int], expected: Sequence[float]) -> None:
    """Chi-square of drawn tokens; a token that may not be drawn must not be."""
    num = counts.total()
    possible = [i for i, prob in enumerate(expected) if prob > 0]
    assert set(counts) <= set(possible)
    chi_square = sum((counts[i] - num * expected[i]) ** 2 / (num * expected[i]) for i in possible)
    assert chi_square < CHI_SQUARE[len(possible) - 1]


def sampler(params: SamplingParams, seed: int = 5) -> Sampler:
    return Sampler(params, seed, 0, TokenHistory([]), [])


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}]
)
def test_law_of_the_drawn_tokens(params: dict[str, float]) -> None:
    given = SamplingParams.model_validate({"temperature": 1.0, **params})
    mine, logits = sampler(given), StepLogits(LOGITS[None])
    check_law(Counter(mine.next_token(logits, 0, t) for t in range(6000)), law(given))


@pytest.mark.parametrize("drafted", range(5))
def test_law_of_an_accepted_or_recovered_token(drafted: int) -> None:
    """A fixed draft: accepted with the target's probability, the emitted token has the target's law."""
    given = SamplingParams(temperature=1.0)
    mine, logits = sampler(given, seed=6), StepLogits(np.stack([LOGITS, LOGITS]))
    num, emitted, accepted = 6000, Counter[int](), 0
    for t in range(num):
        acceptance = accept(
            [drafted], lambda j, t=t: mine.next_token(logits, j, 2 * t + j), lambda _: False
        )
        emitted[acceptance.token_ids[0]] += 1
        accepted += acceptance.num_accepted
    check_law(emitted, PROBS)
    check_law(Counter({0: accepted, 1: num - accepted}), [PROBS[drafted], 1 - PROBS[drafted]])


def constant_target(logits: Sequence[float], eos_token_ids: tuple[int, ...] = ()) -> FakeTarget:
    return FakeTarget(lambda _history: logits, len(logits), eos_token_ids)


def complete(
    target: FakeTarget,
    params: SamplingParams,
    *,
    drafts: Sequence[int] = (),
    num_spec_tokens: int = 0,
    prompt: tuple[int, ...] = (1,),
) -> Completion:
    proposers = scripted({"r": drafts}, (99,), target.architecture.vocab_size)
    engine = make_engine(target, proposers, num_spec_tokens=num_spec_tokens)
    (completion,) = engine.generate([Request("r", prompt, params, seed=0)])
    return completion


def test_samples_and_seeds_differ_in_one_batch() -> None:
    """Rows with and without a seed of their own, greedy ones and samples, together and alone."""
    own = SamplingParams(temperature=1.0, max_tokens=20, seed=3)
    made, greedy = own.model_copy(update={"seed": None}), SamplingParams(max_tokens=20)
    requests = [
        Request("own", (1,), own, seed=3),
        Request("made-0", (1,), made, seed=90),
        Request("greedy", (1,), greedy, seed=3),
        Request("made-1", (1,), made, seed=90, sample_idx=1),
        Request("own again", (1,), own, seed=3),
    ]
    target = constant_target(list(LOGITS))
    together = {c.request.id: c.token_ids for c in make_engine(target).generate(requests)}
    for request in requests:
        (alone,) = make_engine(target).generate([request])
        assert together[request.id] == alone.token_ids
        if request.params.temperature:
            # The inverse CDF by hand: token ids in order, 0.1, 0.5, 0.55, 0.85, 1.
            u = [uniform(request.seed, request.sample_idx, t) for t in range(20)]
            edges = (0.1, 0.5, 0.55, 0.85)
            assert together[request.id] == tuple(sum(v >= e for e in edges) for v in u)
    assert together["own"] == together["own again"]
    assert together["greedy"] == (1,) * 20
    assert len({together[name] for name in ("own", "made-0", "made-1", "greedy")}) == 4


def test_penalties_by_hand() -> None:
    history = TokenHistory([0, 0, 4])
    for token_id in (1, 1, 2):
        history.append(token_id)
    logits = np.array([2.0, -2.0, 1.0, 0.5, -1.0])
    params = SamplingParams(repetition_penalty=2, presence_penalty=0.5, frequency_penalty=0.25)
    penalize_(logits, history, params)
    # Prompt and answer: 2 / 2, -2 * 2, 1 / 2, -, -1 * 2. Answer: 1 twice, 2 once.
    assert logits.tolist() == [1.0, -4.0 - 0.5 - 0.5, 0.5 - 0.5 - 0.25, 0.5, -2.0]


@pytest.mark.parametrize("num_spec_tokens", [0, 1, 3, 7])
@pytest.mark.parametrize(
    ("logits", "params", "answer"),
    [
        # 0: 1.0 .6 .2 -.2 ..; 1: .7 .3 -.1 -.5; 2: 0 -.4: the largest that is left, in turn.
        ([1.0, 0.7, 0.0], {"frequency_penalty": 0.4}, (0, 1, 0, 1, 0, 2, 1, 0)),
        # Once each: 1.0 -> .4 and 0.9 -> .3, then 0 stays ahead.
        ([1.0, 0.9, 0.0], {"presence_penalty": 0.6}, (0, 1, 0, 0, 0, 0, 0, 0)),
        # Prompt (1,): 1.9 / 2 from the start; 0: 2 then 1; 2: 1.2 then 0.6; not once per occurrence.
        ([2.0, 1.9, 1.2], {"repetition_penalty": 2.0}, (0, 2, 0, 0, 0, 0, 0, 0)),
        # Negative logits fall too: 1 is -2 * 2 by the prompt; 0: -1 then -2; 2: -1.5 then -3.
        ([-1.0, -2.0, -1.5], {"repetition_penalty": 2.0}, (0, 2, 0, 0, 0, 0, 0, 0)),
    ],
)
def test_penalties_count_each_token_once_at_draft_positions(
    logits: list[float], params: dict[str, float], answer: tuple[int, ...], num_spec_tokens: int
) -> None:
    given = SamplingParams.model_validate({"max_tokens": 8, **params})
    completion = complete(
        constant_target(logits), given, drafts=answer, num_spec_tokens=num_spec_tokens
    )
    assert completion.token_ids == answer
    if num_spec_tokens:
        assert completion.stats.draft_acceptance_rate == 1


@pytest.mark.parametrize("num_spec_tokens", [0, 1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafted", ["what comes", "EOS"])
@pytest.mark.parametrize("min_tokens", [0, 1, 3, 6])
def test_min_tokens_holds_eos_back_exactly_so_long(
    min_tokens: int, drafted: str, temperature: float, num_spec_tokens: int
) -> None:
    """EOS is all but certain and token 0 next: the answer is min_tokens times 0, then EOS."""
    target = constant_target([100.0, 0.0, 200.0, 0.0], eos_token_ids=(2,))
    params = SamplingParams(max_tokens=6, min_tokens=min_tokens, temperature=temperature)
    drafts = [0] * min_tokens + [2] if drafted == "what comes" else [2] * 7
    completion = complete(target, params, drafts=drafts, num_spec_tokens=num_spec_tokens)
    if min_tokens < 6:
        assert completion.token_ids == (0,) * min_tokens + (2,)
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    else:
        assert completion.token_ids == (0,) * 6
        assert completion.finish_reason == "length"


@pytest.mark.parametrize("bad", [[math.nan] * 4, [0.0, 1.0, math.nan, 0.0], [-math.inf] * 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_spec_tokens", [0, 3])
def test_unusable_logits_end_that_row_only(
    bad: list[float], temperature: float, num_spec_tokens: int
) -> None:
    def logits(history: tuple[int, ...]) -> list[float]:
        return bad if history[0] == 3 and len(history) >= 4 else [0.0, 9.0, 0.0, 0.0]

    params = SamplingParams(max_tokens=5, temperature=temperature, logprobs=0)
    requests = [Request(f"r{i}", (i,), params, seed=i) for i in range(4)]
    answers = {request.id: [1] * 5 for request in requests}
    engine = make_engine(
        FakeTarget(logits, 4), scripted(answers, (99,), 4), 2, num_spec_tokens=num_spec_tokens
    )
    completions = {c.request.id: c for c in engine.generate(requests)}
    assert set(completions) == set(answers)
    for name, completion in completions.items():
        if name == "r3":
            assert completion.finish_reason == "error"
            assert completion.error_type == "NonFiniteLogits"
            assert completion.error
            assert completion.token_ids == ()
        else:
            assert completion.finish_reason == "length"
            assert len(completion.token_ids) == 5


def test_bad_logits_behind_a_rejection_are_never_read() -> None:
    """The draft is wrong, and what the target would say behind it is NaN: no matter."""

    def logits(history: tuple[int, ...]) -> list[float]:
        return [math.nan] * 4 if 2 in history else [0.0, 9.0, 0.0, 0.0]

    params = SamplingParams(max_tokens=5)
    completion = complete(FakeTarget(logits, 4), params, drafts=[2] * 5, num_spec_tokens=3)
    assert completion.token_ids == (1,) * 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_every_token_is_held_back_is_an_error(temperature: float) -> None:
    target = constant_target([0.0, -math.inf, -math.inf], eos_token_ids=(0,))
    params = SamplingParams(max_tokens=4, min_tokens=2, temperature=temperature)
    completion = complete(target, params)
    assert completion.finish_reason == "error"
    assert completion.token_ids == ()


def test_no_finite_logit_is_an_error() -> None:
    with pytest.raises(NonFiniteLogitsError):
        StepLogits(np.full((1, 3), -np.inf)).row(0)
    with pytest.raises(NonFiniteLogitsError):
        StepLogits(np.array([[0.0, np.inf, 1.0]])).row(0)
    masked = StepLogits(np.array([[0.0, -np.inf, 1.0]]))  # Some tokens ruled out: usable.
    assert masked.row(0).tolist() == [0.0, -np.inf, 1.0]
    assert masked.greedy(0) == 2


@pytest.mark.parametrize("num_spec_tokens", [0, 3])
def test_logprobs_are_the_models_own(num_spec_tokens: int) -> None:
    """Of the raw logits, whatever temperature, penalties and filters made of them."""
    rng = np.random.default_rng(1)
    table = rng.normal(0, 2, (40, 6))
    table[7] = [1.0, 3.0, 3.0, 2.0, 3.0, 0.0]  # Ties.
    target = FakeTarget(lambda history: list(table[len(history)]), 6)
    params = SamplingParams(
        max_tokens=12, temperature=1.3, top_k=4, frequency_penalty=0.5, logprobs=3, min_tokens=2
    )
    plain = complete(target, params)
    completion = complete(target, params, drafts=plain.token_ids, num_spec_tokens=num_spec_tokens)
    assert completion.token_ids == plain.token_ids
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 12
    assert len({entry.rank for entry in completion.logprobs}) > 1
    for t, entry in enumerate(completion.logprobs):
        raw = torch.from_numpy(table[1 + t])  # One prompt token.
        expected = torch.log_softmax(raw, 0).tolist()
        assert entry.token_id == completion.token_ids[t]
        assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-12)
        assert entry.logprob < 0
        assert entry.rank == 1 + sum(value > expected[entry.token_id] for value in expected)
        by_logprob = sorted(range(6), key=lambda i: (-expected[i], i))[:3]
        assert [i for i, _ in entry.top] == by_logprob
        assert [v for _, v in entry.top] == pytest.approx([expected[i] for i in by_logprob])


def test_how_many_logprobs() -> None:
    target = constant_target(list(LOGITS))
    for asked, given in [(0, 0), (2, 2), (5, 5), (50, 5)]:
        completion = complete(target, SamplingParams(max_tokens=2, logprobs=asked))
        assert completion.logprobs is not None
        assert [len(entry.top) for entry in completion.logprobs] == [given] * 2
    assert complete(target, SamplingParams(max_tokens=2)).logprobs is None
