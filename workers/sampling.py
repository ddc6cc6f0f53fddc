"""The target's token at a position: penalties, filters, and one position-keyed uniform number.

Legend: V vocabulary, n positions with logits.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from workers.config import SamplingParams
from workers.request import TokenLogprobs

_UNIT = 2.0**-53


class NonFiniteLogitsError(ArithmeticError):
    """The model gave NaN, or no finite logit at all, for a row."""


def uniform(seed: int, sample_idx: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its key.

    Counter-based (Philox 4x64, Salmon et al. 2011), so that no draw depends on how many came before:
    the property that lets a retried, resumed or differently batched row repeat itself.
    """
    bits = np.random.Philox(key=[seed, sample_idx], counter=[position, 0, 0, 0]).random_raw()
    return float(int(bits) >> 11) * _UNIT


class TokenHistory:
    """Which tokens a row has seen, for the penalties: the accepted ones, in order."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.prompt = set(prompt_token_ids)
        self.generated: Counter[int] = Counter()
        self._length = 0

    def append(self, token_id: int) -> None:
        """Count a generated token."""
        self.generated[token_id] += 1
        self._length += 1

    def __len__(self) -> int:
        return self._length


class StepLogits:
    """The logits [n, V] of one pass, with the greedy tokens found for all positions at once."""

    def __init__(self, logits_nV: np.ndarray) -> None:
        self._logits_nV = logits_nV
        self._greedy_n = logits_nV.argmax(axis=1) if len(logits_nV) else np.empty(0, np.int64)

    def row(self, index: int) -> np.ndarray:
        """The logits [V] at a position; raises NonFiniteLogitsError if they are unusable.

        numpy's argmax finds a NaN where there is one, so the largest value tells.
        """
        logits_V: np.ndarray = self._logits_nV[index]
        if not np.isfinite(logits_V[self._greedy_n[index]]):
            raise NonFiniteLogitsError("the model's logits are not finite")
        return logits_V

    def greedy(self, index: int) -> int:
        """The first of the likeliest tokens at a position."""
        return int(self._greedy_n[index])


class Sampler:
    """Draws one row's tokens."""

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        sample_idx: int,
        history: TokenHistory,
        end_token_ids: Sequence[int],
    ) -> None:
        """Keep the row's parameters; `end_token_ids` are held back until min_tokens is reached."""
        self._params = params
        self._key = seed, sample_idx
        self._history = history
        self._end_token_ids = list(end_token_ids)
        self._penalized = (
            params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        )

    def next_token(self, logits: StepLogits, index: int, position: int) -> int:
        """The token at `position` (of the answer), from the logits at `index` of the pass."""
        logits_V = logits.row(index)
        adjusted_V = self._adjust(logits_V)
        if adjusted_V is not logits_V and not np.isfinite(adjusted_V.max()):
            raise NonFiniteLogitsError("penalties or min_tokens leave no token to choose from")
        if self._params.temperature == 0:
            return logits.greedy(index) if adjusted_V is logits_V else int(adjusted_V.argmax())
        probs_V = filtered_probs(adjusted_V, self._params)
        return draw(probs_V, uniform(*self._key, position))

    def logprobs(self, logits: StepLogits, index: int, token_id: int) -> TokenLogprobs:
        """The model's own log-probabilities at a position."""
        logits_V = logits.row(index).astype(np.float64)
        logprobs_V = logits_V - logits_V.max()
        logprobs_V -= np.log(np.exp(logprobs_V).sum())
        chosen = logprobs_V[token_id]
        count = min(self._params.logprobs or 0, len(logprobs_V))
        likeliest = np.argsort(-logprobs_V, kind="stable")[:count] if count else ()
        top = tuple((int(i), float(logprobs_V[i])) for i in likeliest)
        return TokenLogprobs(token_id, float(chosen), int((logprobs_V > chosen).sum()) + 1, top)

    def _adjust(self, logits_V: np.ndarray) -> np.ndarray:
        """Penalties and min_tokens, on a copy where there is anything to change."""
        held_back = len(self._history) < self._params.min_tokens and self._end_token_ids
        if not (self._penalized or held_back):
            return logits_V
        adjusted_V = logits_V.astype(np.float64)
        if self._penalized:
            penalize_(adjusted_V, self._history, self._params)
        if held_back:
            adjusted_V[self._end_token_ids] = -np.inf
        return adjusted_V


def penalize_(logits_V: np.ndarray, history: TokenHistory, params: SamplingParams) -> None:
    """Apply the penalties in place: repetition over prompt and answer, the others over the answer."""
    if params.repetition_penalty != 1:
        seen = np.fromiter(history.prompt | history.generated.keys(), np.int64)
        values = logits_V[seen]
        penalty = params.repetition_penalty
        logits_V[seen] = np.where(values > 0, values / penalty, values * penalty)
    if history.generated and (params.presence_penalty or params.frequency_penalty):
        ids = np.fromiter(history.generated.keys(), np.int64)
        counts = np.fromiter(history.generated.values(), np.int64)
        logits_V[ids] -= params.presence_penalty + params.frequency_penalty * counts


def filtered_probs(logits_V: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution [V] (float64, not normalized) a row is drawn from; temperature > 0.

    Temperature, then min-p, then top-k (ties with the k-th are kept), then top-p over what is left.
    """
    scaled_V = logits_V.astype(np.float64)
    scaled_V -= scaled_V.max()
    probs_V: np.ndarray = np.exp(scaled_V / params.temperature)
    if params.min_p > 0:
        probs_V[probs_V < params.min_p * probs_V.max()] = 0
    if 0 < params.top_k < len(probs_V):
        threshold = np.partition(probs_V, -params.top_k)[-params.top_k]
        probs_V[probs_V < threshold] = 0
    if params.top_p < 1:
        _keep_top_p_(probs_V, params.top_p)
    return probs_V


def _keep_top_p_(probs_V: np.ndarray, top_p: float) -> None:
    """Zero all but the fewest likeliest tokens whose mass reaches top_p; the earlier id wins a tie."""
    wanted = top_p * probs_V.sum()
    count = 64
    while True:  # Sort as few of the likeliest as suffice.
        count = min(count, len(probs_V))
        threshold = np.partition(probs_V, -count)[-count]
        candidates = np.flatnonzero(probs_V >= threshold)
        order = candidates[np.argsort(-probs_V[candidates], kind="stable")]
        mass = np.cumsum(probs_V[order])
        if mass[-1] >= wanted or count == len(probs_V):
            break
        count *= 8
    kept = order[: int(np.searchsorted(mass, wanted)) + 1]
    values = probs_V[kept]
    probs_V[:] = 0
    probs_V[kept] = values


def draw(probs_V: np.ndarray, u: float) -> int:
    """Inverse CDF in token-id order: the first token whose cumulative mass exceeds u times the whole."""
    cumulative_V = np.cumsum(probs_V)
    token_id = int(np.searchsorted(cumulative_V, u * cumulative_V[-1], side="right"))
    if token_id == len(probs_V):  # u * total was rounded up to the total.
        token_id = int(np.flatnonzero(probs_V)[-1])
    return token_id
