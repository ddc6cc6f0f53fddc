"""Speculation changes nothing but the time: every way to draft and to batch against naive decoding.

The expected tokens come from tests/reference.py: one row, one token at a time, a fresh prefill each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_args

import numba
import pytest

from quant.config import Precision
from tests.fakes import (
    ScriptedProposer,
    make_engine,
    make_model,
    make_requests,
    one_thread,  # noqa: F401
)
from tests.reference import Answer, reference_answer
from workers.budget import DraftBudget
from workers.build import build_proposer
from workers.config import EngineConfig, ProposerName, SamplingParams
from workers.proposer import NoProposer, Proposer, ProposerFactory
from workers.request import Completion, Request
from workers.stats import AcceptanceStats
from workers.step_times import StepTimes

pytestmark = pytest.mark.usefixtures("one_thread")

PRECISIONS: tuple[Precision, ...] = ("float64", "w8a8", "bf16")
NUM_SPEC_TOKENS = (0, 1, 3, 7)
# name -> how many tokens of each scripted draft are right (then one is wrong), in turn.
SCRIPTS: dict[str, tuple[int, ...]] = {
    "right-0": (0,),
    "right-1": (1,),
    "right-2": (2,),
    "right-all": (99,),
    "ragged": (3, 0, 7, 1),
}
CONFIGURED: tuple[ProposerName, ...] = ("none", "ngram", "suffix")
# Configurations of a proposer, by what is not its default.
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"proposer": name} for name in CONFIGURED},
    "suffix-alone": {"proposer": "suffix", "suffix_pool_tokens": 0},
    "suffix-small-pool": {"proposer": "suffix", "suffix_pool_tokens": 40},
}
PROPOSERS = (*VARIANTS, *SCRIPTS, "some-rows-draft")
# Prices under which a budget takes some of what is drafted, and leaves some.
BUDGETS = {
    "in-full": None,
    "budget-flat": StepTimes((1, 64), (1.0, 1.4)),
    "budget-steep": StepTimes((1, 2, 4, 8, 64), (1.0, 1.01, 1.1, 1.6, 13.0)),
}


@dataclass(frozen=True)
class Mix:
    """How the requests share the engine."""

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 256
    max_model_len: int = 48
    alone: bool = False


MIXES = {
    "alone": Mix(max_num_seqs=1, alone=True),
    "company": Mix(),
    "admitted-late": Mix(max_num_seqs=2),
    "small-prefill-budget": Mix(max_num_seqs=5, max_num_batched_tokens=3),
    "no-room": Mix(max_model_len=33),  # The longest prompt has 30 tokens; others lack room too.
}
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 1.0}}


@cache
def answers(precision: Precision, sampling: str, max_len: int) -> dict[str, Answer]:
    model = make_model(precision)
    return {r.id: reference_answer(model, r, max_len) for r in requests(sampling)}


def requests(sampling: str) -> list[Request]:
    return make_requests(**SAMPLING[sampling])


def factory(name: str, tokens: dict[str, Sequence[int]]) -> ProposerFactory:
    """The proposers called `name`; scripted ones are told the answers."""
    if name in VARIANTS:
        return build_proposer(EngineConfig.model_validate(VARIANTS[name]))

    def scripted(request: Request) -> Proposer:
        rights = (99,) if name == "some-rows-draft" else SCRIPTS[name]
        if name == "some-rows-draft" and int(request.id[1:]) % 2:
            return NoProposer()
        return ScriptedProposer(tokens[request.id], rights, vocab_size=61)

    return scripted


def generate(
    precision: Precision,
    mix: Mix,
    num_spec: int,
    proposers: ProposerFactory,
    wanted: list[Request],
    times: StepTimes | None = None,
) -> dict[str, Completion]:
    batches = [[request] for request in wanted] if mix.alone else [wanted]
    completions = []
    for batch in batches:
        engine = make_engine(
            make_model(precision),
            proposers,
            mix.max_num_seqs,
            mix.max_num_batched_tokens,
            mix.max_model_len,
            num_spec,
            times and DraftBudget(times),
        )
        completions += list(engine.generate(batch))
    assert len(completions) == len(wanted)
    return {completion.request.id: completion for completion in completions}


def total(completions: dict[str, Completion]) -> AcceptanceStats:
    return sum((c.stats for c in completions.values()), AcceptanceStats())


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("proposer", "num_spec"),
    # Nobody is asked for a draft of 0 tokens: one scripted proposer stands for all.
    # A pool of another size needs one draft length only.
    [
        (p, n)
        for p in PROPOSERS
        for n in NUM_SPEC_TOKENS
        if (n or p in ("none", "ngram", "ragged")) and (n == 3 or "suffix-" not in p)
    ],
)
def test_matrix(
    proposer: str, num_spec: int, precision: Precision, mix: str, sampling: str
) -> None:
    """Prompts and answers of different lengths in every mix."""
    expected = answers(precision, sampling, MIXES[mix].max_model_len)
    tokens = {name: answer.token_ids for name, answer in expected.items()}
    completions = generate(
        precision, MIXES[mix], num_spec, factory(proposer, tokens), requests(sampling)
    )
    assert {name: c.token_ids for name, c in completions.items()} == tokens
    assert {name: c.finish_reason for name, c in completions.items()} == {
        name: answer.finish_reason for name, answer in expected.items()
    }
    check_that_drafts_were_tested(proposer, num_spec, total(completions))


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("prices", [name for name, times in BUDGETS.items() if times])
@pytest.mark.parametrize("proposer", ["suffix", "ragged"])
def test_matrix_with_a_budget(
    proposer: str, prices: str, precision: Precision, mix: str, sampling: str
) -> None:
    expected = answers(precision, sampling, MIXES[mix].max_model_len)
    tokens = {name: answer.token_ids for name, answer in expected.items()}
    proposers, wanted = factory(proposer, tokens), requests(sampling)
    completions = generate(precision, MIXES[mix], 7, proposers, wanted, BUDGETS[prices])
    assert {name: c.token_ids for name, c in completions.items()} == tokens
    stats = total(completions)
    assert stats.num_draft_tokens > 0
    if prices == "budget-steep":
        in_full = total(generate(precision, MIXES[mix], 7, factory(proposer, tokens), wanted))
        assert stats.num_draft_tokens < in_full.num_draft_tokens


def check_that_drafts_were_tested(proposer: str, num_spec: int, stats: AcceptanceStats) -> None:
    """The matrix is worth something only where drafts are accepted, and where they are rejected."""
    if proposer == "none" or num_spec == 0:
        assert stats.num_draft_tokens == 0
        return
    assert stats.num_draft_tokens > 0
    rejected = stats.num_draft_tokens - stats.num_accepted_draft_tokens
    assert (stats.num_accepted_draft_tokens > 0) == (proposer != "right-0")
    if proposer in ("ngram", "suffix", "right-0", "ragged") or (
        proposer == "right-2" and num_spec > 2
    ):
        assert rejected > 0


@pytest.mark.parametrize("num_threads", [1, 2])
def test_threads_change_nothing(num_threads: int) -> None:
    expected = answers("w8a8", "sampled", 48)
    tokens = {name: answer.token_ids for name, answer in expected.items()}
    numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))
    try:
        completions = generate(
            "w8a8", MIXES["company"], 3, factory("ragged", tokens), requests("sampled")
        )
    finally:
        numba.set_num_threads(1)
    assert {name: c.token_ids for name, c in completions.items()} == tokens


def test_answers_end_in_both_ways() -> None:
    for sampling in SAMPLING:
        for max_len in (33, 48):
            reasons = {a.finish_reason for a in answers("w8a8", sampling, max_len).values()}
            assert reasons == {"stop", "length"}


def test_two_samples_of_one_prompt_differ_and_sampling_is_not_greedy() -> None:
    for precision in PRECISIONS:
        greedy, sampled = (answers(precision, sampling, 48) for sampling in SAMPLING)
        assert greedy["r4"].token_ids == greedy["r5"].token_ids
        assert sampled["r4"].token_ids != sampled["r5"].token_ids
        assert all(greedy[name].token_ids != sampled[name].token_ids for name in greedy)


def test_every_proposer_and_script_is_in_the_matrix() -> None:
    assert set(get_args(ProposerName)) == set(CONFIGURED)
    assert set(PROPOSERS) >= {*get_args(ProposerName), *SCRIPTS}
    assert EngineConfig.model_fields["proposer"].annotation == ProposerName


@pytest.mark.parametrize("num_spec", [1, 7])
@pytest.mark.parametrize("proposer", ["ngram", "suffix"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_word_48_times(precision: Precision, proposer: str, num_spec: int) -> None:
    request = Request("r", (7,) * 48, SamplingParams(max_tokens=24, ignore_eos=True), seed=0)
    expected = reference_answer(make_model(precision), request, 100)
    proposers = factory(proposer, {})
    completion = generate(precision, Mix(max_model_len=100), num_spec, proposers, [request])["r"]
    assert completion.token_ids == expected.token_ids
    assert completion.stats.num_draft_tokens > 0


_VARIED: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "presence-and-frequency": {"presence_penalty": 1.5, "frequency_penalty": 0.8},
    "negative-penalties": {"repetition_penalty": 0.8, "frequency_penalty": -0.5},
    "min-tokens": {"min_tokens": 9, "repetition_penalty": 1.2},
    "min-tokens-and-stop-id": {"min_tokens": 6, "stop_token_ids": [0, 30, 31, 32, 33, 34, 35, 36]},
    "ignore-eos": {"ignore_eos": True},
    "filters": {"top_k": 12, "top_p": 0.9, "min_p": 0.02, "frequency_penalty": 0.3},
}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("varied", _VARIED)
def test_processors_and_logprobs(varied: str, precision: Precision, sampling: str) -> None:
    params = {**SAMPLING[sampling], **_VARIED[varied], "logprobs": 3}
    check_against_reference(precision, make_requests(**params))


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("at", [0, 2, 4, 8])
def test_stop_strings(at: int, precision: Precision, sampling: str) -> None:
    """Each row's stop string is two characters of its own answer (a token is a character here)."""
    varied = []
    for request in make_requests(**SAMPLING[sampling], logprobs=0):
        text = reference_answer(make_model(precision), request, 48).text
        stop = text[at : at + 2] or "?"
        changed = request.params.model_copy(update={"stop": (stop, "no such text")})
        varied.append(replace(request, params=changed))
    expected = check_against_reference(precision, varied)
    stopped = [a for r, a in zip(varied, expected, strict=True) if a.stop_reason in r.params.stop]
    assert stopped


def check_against_reference(precision: Precision, wanted: list[Request]) -> list[Answer]:
    """Compare full batches, some rows admitted late, with naive decoding, for several proposers."""
    expected = {r.id: reference_answer(make_model(precision), r, 48) for r in wanted}
    tokens = {name: answer.token_ids for name, answer in expected.items()}
    for proposer in ("none", "ngram", "suffix", "right-all", "ragged", "some-rows-draft"):
        proposers = factory(proposer, tokens)
        completions = generate(precision, Mix(max_num_seqs=4), 5, proposers, wanted)
        for name, answer in expected.items():
            check_completion(completions[name], answer)
        if proposer not in VARIANTS:
            assert total(completions).num_accepted_draft_tokens > 0
    return list(expected.values())


def check_completion(completion: Completion, answer: Answer) -> None:
    """Tokens, text, ending and log-probabilities."""
    assert completion.token_ids == answer.token_ids
    assert completion.text == answer.text
    assert completion.finish_reason == answer.finish_reason
    assert completion.stop_reason == answer.stop_reason
    assert completion.logprobs is not None
    assert tuple(entry.token_id for entry in completion.logprobs) == answer.token_ids
    assert [entry.logprob for entry in completion.logprobs] == pytest.approx(
        [logprob for logprob, _ in answer.logprobs], abs=1e-9
    )
    assert [entry.rank for entry in completion.logprobs] == [rank for _, rank in answer.logprobs]
