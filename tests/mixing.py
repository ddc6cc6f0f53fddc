"""A fake target that sees every token out of place."""

from collections.abc import Sequence

from tests.fakes import FakeTarget
from workers.config import SamplingParams
from workers.request import Request

VOCAB = 11


def mixed(history: Sequence[int]) -> int:
    """A next token that depends on every token before it and on where each of them stands."""
    return sum((at + 1) * token_id for at, token_id in enumerate(history)) % VOCAB


def mixing_target() -> FakeTarget:
    return FakeTarget(lambda history: [float(i == mixed(history)) for i in range(VOCAB)], VOCAB)


def mixed_answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(mixed(tokens))
    return tokens[len(prompt) :]


def request(name: str, prompt: tuple[int, ...], max_tokens: int = 3) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens), seed=0)
