"""The promise on a real model: SmolLM2 under W8A8 answers the same with drafts and without."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pipeline.admission import Admission, load_tokenizer
from pipeline.requests import build_requests
from pipeline.sources import RawRow
from quant.checkpoint import open_checkpoint
from quant.config import QuantConfig
from quant.convert import convert
from workers.build import build_proposer
from workers.config import EngineConfig, SamplingParams
from workers.engine import Engine, EngineLimits
from workers.model import TargetModel, build_backend
from workers.request import Completion, Request
from workers.stats import AcceptanceStats
from workers.stopping import TokenizerText

pytestmark = pytest.mark.real_model

PROMPTS = Path(__file__).parents[1] / "examples" / "prompts.jsonl"
NUM_PROMPTS, MAX_TOKENS, MAX_LEN = 40, 24, 160
NUM_SPEC_TOKENS = 5

Answers = dict[str, Completion]


class Bench:
    """The model, and everything needed to put an engine around it."""

    def __init__(self, folder: Path) -> None:
        checkpoint = open_checkpoint(folder)
        config = QuantConfig(precision="w8a8")
        self._model = TargetModel(
            checkpoint.architecture,
            list(convert(checkpoint, config)),
            build_backend(config.precision),
            MAX_LEN,
        )
        tokenizer = load_tokenizer(folder)
        self._text = TokenizerText(tokenizer.backend_tokenizer.to_str())
        self._admission = Admission(tokenizer, SamplingParams(), MAX_LEN, len(tokenizer))

    def requests(self, temperature: float) -> list[Request]:
        """The shortest 40 prompts of the examples: reading prompts is most of the time here."""
        params = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS)
        made: list[Request] = []
        for number, line in enumerate(PROMPTS.read_text(encoding="utf-8").splitlines()):
            columns = json.loads(line)
            columns.pop("sampling_params", None)
            row = self._admission.admit(RawRow(number, line[:20], columns), "prompts.jsonl")
            if row.prompt_token_ids and len(row.prompt_token_ids) + MAX_TOKENS < MAX_LEN:
                plan_row: dict[str, Any] = {"id": row.id, "sampling_params": None}
                plan_row["prompt_token_ids"] = row.prompt_token_ids
                made += build_requests(plan_row, params, run_seed=0)
        assert len(made) >= NUM_PROMPTS
        shortest = sorted(made, key=lambda request: len(request.prompt_token_ids))[:NUM_PROMPTS]
        # Long and short ones are neighbours in every batch.
        return [request for start in range(5) for request in shortest[start::5]]

    def answer(self, requests: Sequence[Request], proposer: str, max_num_seqs: int) -> Answers:
        """Generate with an engine of its own."""
        config = EngineConfig.model_validate({"proposer": proposer})
        num_spec_tokens = NUM_SPEC_TOKENS if proposer != "none" else 0
        limits = EngineLimits(max_num_seqs, 512, MAX_LEN, num_spec_tokens)
        engine = Engine(self._model, limits, build_proposer(config), self._text)
        return {completion.request.id: completion for completion in engine.generate(requests)}


@pytest.fixture(scope="module")
def bench(demo_model: Path) -> Bench:
    return Bench(demo_model)


@pytest.fixture(scope="module")
def plain(bench: Bench) -> Callable[[float], Answers]:
    """All prompts at once, nothing drafted: what every other way is held against."""
    return cache(lambda temperature: bench.answer(bench.requests(temperature), "none", 16))


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("proposer", "max_num_seqs"),
    [("ngram", 16), ("none", 4), ("ngram", 4), ("none", 1), ("ngram", 1)],
)
def test_drafts_and_batches_change_no_token(
    bench: Bench,
    plain: Callable[[float], Answers],
    temperature: float,
    proposer: str,
    max_num_seqs: int,
) -> None:
    requests, expected = bench.requests(temperature), plain(temperature)
    assert len(expected) == len({request.prompt_token_ids for request in requests}) == NUM_PROMPTS
    assert total(expected).num_draft_tokens == 0
    answers = bench.answer(requests, proposer, max_num_seqs)
    for name, completion in expected.items():
        assert answers[name].token_ids == completion.token_ids
        assert answers[name].text == completion.text
    if proposer != "none":
        check_stats(answers)


def total(answers: Answers) -> AcceptanceStats:
    return sum((c.stats for c in answers.values()), AcceptanceStats())


def check_stats(answers: Answers) -> None:
    """Some drafts are right and some wrong, or the comparison says nothing; and the sums hold."""
    stats = total(answers)
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    for name, completion in answers.items():
        counted = completion.stats.num_steps + completion.stats.num_accepted_draft_tokens
        assert 0 <= counted - len(completion.token_ids) <= NUM_SPEC_TOKENS, name


def test_the_answers_are_of_a_model_that_can_write(bench: Bench) -> None:
    """A broken conversion would be repeatable, too."""
    admission = bench._admission
    asked = "What is the capital of France? Answer in one sentence."
    messages = [{"role": "user", "content": asked}]
    row = admission.admit(RawRow(0, "here", {"messages": messages}), "here")
    request = Request("r", tuple(row.prompt_token_ids or ()), SamplingParams(max_tokens=20), seed=0)
    answer = bench.answer([request], "ngram", 1)["r"]
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"
