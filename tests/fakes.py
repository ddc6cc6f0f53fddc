"""Stand-ins for the engine's parts, and tiny random models made without a checkpoint."""

import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby

import numba
import numpy as np
import pytest
import torch
from hypothesis import settings

from quant.architecture import Architecture
from quant.config import Precision
from quant.convert import Piece
from quant.int8 import max_activation_code, pack, quantize_rows
from workers.backend import StepBatch
from workers.budget import DraftBudget
from workers.config import SamplingParams
from workers.engine import Engine, EngineLimits
from workers.model import TargetModel, build_backend
from workers.proposer import Confidence, Draft, NoProposer, ProposerFactory
from workers.request import Completion, Request

# The same examples in every run, and no folder left behind.
PROPERTY = settings(max_examples=60, deadline=None, database=None, derandomize=True)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors on one thread: on a busy machine a second one is only waited for."""
    before = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    numba.set_num_threads(before[1])


NextLogits = Callable[[tuple[int, ...]], Sequence[float]]


@dataclass(frozen=True)
class FakeArchitecture:
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()


@dataclass
class FakeCache:
    """Remembers which token was written to which position, in the place of keys and values."""

    max_len: int
    tokens: list[list[int]]
    nbytes: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    def copy_prefix_(self, source: int, target: int, length: int) -> None:
        assert length <= len(self.tokens[source]), "copied what was never written"
        self.tokens[target] = self.tokens[source][:length]


class FakeTarget:
    """A target whose logits are a function of the tokens that its cache holds.

    Every pass is checked: one window a row, ascending without gaps, starting no later than what is
    written, and ending within the row. `passes` keeps (row, first position, tokens) of each window.
    """

    def __init__(
        self, next_logits: NextLogits, vocab_size: int, eos_token_ids: tuple[int, ...] = ()
    ) -> None:
        self.architecture = FakeArchitecture(vocab_size, eos_token_ids)
        self.passes: list[list[tuple[int, int, tuple[int, ...]]]] = []
        self._next_logits = next_logits

    def new_cache(self, num_rows: int, max_len: int) -> FakeCache:
        return FakeCache(max_len, [[] for _ in range(num_rows)])

    def forward(self, batch: StepBatch, cache: FakeCache) -> torch.Tensor:
        tokens = list(
            zip(
                batch.rows.tolist(), batch.positions.tolist(), batch.token_ids.tolist(), strict=True
            )
        )
        self.passes.append([])
        for row, group in groupby(tokens, key=lambda token: token[0]):
            window = list(group)
            first, token_ids = window[0][1], [token_id for _, _, token_id in window]
            assert row not in {seen for seen, _, _ in self.passes[-1]}, "two windows of one row"
            assert [at for _, at, _ in window] == list(range(first, first + len(window)))
            assert first <= len(cache.tokens[row]), "a gap in the cache"
            assert first + len(window) <= cache.max_len, "written past the end of the row"
            cache.tokens[row][first:] = token_ids
            self.passes[-1].append((row, first, tuple(token_ids)))
        logits = [
            self._next_logits(tuple(cache.tokens[tokens[i][0]][: tokens[i][1] + 1]))
            for i in batch.logit_indices.tolist()
        ]
        shape = len(logits), self.architecture.vocab_size
        return torch.tensor(logits, dtype=torch.float64).reshape(shape)


def scripted_logits(
    answers: Mapping[tuple[int, ...], Sequence[int]], vocab_size: int
) -> NextLogits:
    """Logits that spell each prompt's answer; a row that is off its script gets the last token."""

    def next_logits(history: tuple[int, ...]) -> list[float]:
        token_id = vocab_size - 1
        for prompt, answer in answers.items():
            done = len(history) - len(prompt)
            if 0 <= done < len(answer) and history == (*prompt, *answer[:done]):
                token_id = answer[done]
        return [5.0 * (i == token_id) for i in range(vocab_size)]

    return next_logits


class ScriptedProposer:
    """Knows the answer: right so many times and then wrong, in whole windows unless told lengths.

    The n-th draft is right in its first `rights[n]` tokens and `lengths[n]` tokens long at most (both
    start over when used up).
    """

    def __init__(
        self,
        answer: Sequence[int],
        rights: Sequence[int],
        vocab_size: int,
        lengths: Sequence[int] | None = None,
    ) -> None:
        self._answer, self._vocab_size = list(answer), vocab_size
        self._rights, self._lengths = rights, lengths
        self._num_generated: int | None = None
        self._num_drafts = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        if self._num_generated is None:  # The prompt comes first.
            self._num_generated = 0
        else:
            self._num_generated += len(token_ids)

    def propose(self, max_tokens: int) -> Draft:
        right = self._rights[self._num_drafts % len(self._rights)]
        length = max_tokens
        if self._lengths is not None:
            length = min(length, self._lengths[self._num_drafts % len(self._lengths)])
        self._num_drafts += 1
        ahead = [*self._answer[self._num_generated :], *[0] * length][:length]
        return Draft(
            tuple(t if j < right else (t + 1) % self._vocab_size for j, t in enumerate(ahead)),
            tuple(Confidence(1 + j) for j in range(length)),
        )


def scripted(
    answers: Mapping[str, Sequence[int]],
    rights: Sequence[int],
    vocab_size: int,
    lengths: Sequence[int] | None = None,
) -> ProposerFactory:
    """ScriptedProposers that know the answers by the requests' ids."""
    return lambda request: ScriptedProposer(answers[request.id], rights, vocab_size, lengths)


class ByteDetokenizer:
    """Token id = byte of UTF-8 text; ids from 256 on are special tokens and have no text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(i for i in token_ids if i < 256).decode(errors="replace")

    def stream(self) -> "ByteStream":
        return ByteStream()


class ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def step(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id]) if token_id < 256 else b"")


def make_engine(
    model: TargetModel | FakeTarget,
    proposer_factory: ProposerFactory = lambda _request: NoProposer(),
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 64,
    num_spec_tokens: int = 0,
    budget: DraftBudget | None = None,
) -> Engine:
    """An engine with small limits."""
    limits = EngineLimits(max_num_seqs, max_num_batched_tokens, max_model_len, num_spec_tokens)
    return Engine(model, limits, proposer_factory, ByteDetokenizer(), budget)


def run_script(
    answer: Sequence[int],
    params: SamplingParams,
    num_spec_tokens: int,
    *,
    eos_token_ids: tuple[int, ...] = (256,),
    rights: Sequence[int] = (99,),
    lengths: Sequence[int] | None = None,
    max_model_len: int = 64,
) -> Completion:
    """The completion of one request whose target would go on to spell the whole of `answer`."""
    prompt = (1, 2, 3)
    target = FakeTarget(scripted_logits({prompt: answer}, 260), 260, eos_token_ids)
    factory = scripted({"r": answer}, rights, 260, lengths)
    engine = make_engine(
        target, factory, max_model_len=max_model_len, num_spec_tokens=num_spec_tokens
    )
    (completion,) = engine.generate([Request("r", prompt, params, seed=0)])
    return completion


TINY = Architecture(
    model_type="qwen2",
    vocab_size=61,  # Odd, and 40 is no multiple of a tile: padding is exercised.
    hidden_size=32,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-6,
    max_position_embeddings=128,
    tied_head=False,
    qkv_bias=True,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    rope_inv_freq=(1.0, 0.25, 0.0625, 0.015625),
    rope_scaling=1.0,
    windows=(6, 0),  # One sliding-window layer, full long before most answers end.
    eos_token_ids=(3, 4),
)


# With this seed some answers end at EOS and some at their length.
_SEED = 4


@cache
def make_model(precision: Precision, seed: int = _SEED) -> TargetModel:
    """A tiny random model, the same weights in every precision."""
    return TargetModel(TINY, make_pieces(precision, seed), build_backend(precision), max_len=128)


def make_pieces(precision: Precision, seed: int = _SEED) -> list[Piece]:
    """Random weights as `quant.convert` lays them out: float64, or w8a8 or bf16 with bf16 embeddings.

    w8a8 is as mixed as it may be: a linear left in bf16, and one with finer activations, as the head's.
    """
    rng = np.random.default_rng(seed)
    a = TINY

    def linear(
        name: str, num_outputs: int, num_inputs: int, gain: float = 1.0, kind: str = "int8"
    ) -> Piece:
        weight = rng.normal(0, gain / num_inputs**0.5, (num_outputs, num_inputs))
        if precision == "float64":
            return {f"{name}.weight": weight}
        if precision == "bf16" or kind == "bf16":
            return {
                f"{name}.weight": torch.from_numpy(weight).bfloat16().view(torch.uint16).numpy()
            }
        codes, scale = quantize_rows(torch.from_numpy(weight))
        piece = {f"{name}.weight": pack(codes).numpy(), f"{name}.scale": scale.numpy()}
        if kind == "fine":
            code = max_activation_code(num_inputs)
            piece[f"{name}.max_code"] = np.array([code], dtype=np.int32)
        return piece

    def vector(size: int, mean: float) -> np.ndarray:
        values = rng.normal(mean, 0.1, size)
        return values if precision == "float64" else values.astype(np.float32)

    embeddings = torch.from_numpy(rng.normal(0, 1, (a.vocab_size, a.hidden_size)))
    if precision != "float64":
        embeddings = embeddings.bfloat16().view(torch.uint16)
    outer = {"embeddings.weight": embeddings.numpy(), "final_norm": vector(a.hidden_size, 1)}
    # A sharp head and weak layers: answers fall into loops, sampled ones too, so n-grams are right.
    outer |= linear("head", a.vocab_size, a.hidden_size, gain=4, kind="fine")
    layers = [
        {"input_norm": vector(a.hidden_size, 1), "post_norm": vector(a.hidden_size, 1)}
        | linear("qkv", a.qkv_size, a.hidden_size)
        | {"qkv.bias": vector(a.qkv_size, 0)}
        | linear("o", a.hidden_size, a.num_heads * a.head_dim, gain=0.5, kind=o)
        | linear("gate_up", 2 * a.intermediate_size, a.hidden_size)
        | linear("down", a.hidden_size, a.intermediate_size, gain=0.5, kind=down)
        for o, down in (("bf16", "int8"), ("int8", "fine"))
    ]
    return [outer, *layers]


def make_requests(**params: object) -> list[Request]:
    """Requests of different lengths, most prompts repetitive; the last two are samples of one prompt."""
    prompts: list[tuple[tuple[int, ...], int]] = [
        ((5, 9, 17) * 4, 20),
        ((7,) * 13, 16),
        ((11,), 22),
        (tuple(i * i % 59 for i in range(5, 35)), 9),
        ((20, 21, 22, 23) * 3 + (20, 21), 24),
        ((20, 21, 22, 23) * 3 + (20, 21), 24),
    ]
    return [
        Request(
            id=f"r{i}",
            prompt_token_ids=prompt,
            params=SamplingParams.model_validate({"max_tokens": max_tokens, **params}),
            seed=1000 + min(i, 4),
            sample_idx=max(0, i - 4),
        )
        for i, (prompt, max_tokens) in enumerate(prompts)
    ]
