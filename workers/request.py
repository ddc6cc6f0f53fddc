"""What goes into the engine and what comes out: every request gives exactly one completion."""

from dataclasses import dataclass, field
from typing import Literal

from workers.config import SamplingParams
from workers.stats import AcceptanceStats

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class Request:
    """One sample of one prompt. `seed` is the effective one: the row's own, or one made for it."""

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    sample_idx: int = 0


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position: the chosen token's, its rank (1 is the likeliest), and the
    likeliest tokens' (token id, log-probability).
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Completion:
    """An answer, or the reason why there is none.

    `token_ids` end with the EOS or stop token, or with the token that completed a stop string;
    `text` holds neither special tokens nor the stop string. `stop_reason` is the stop token id or
    string that ended the answer, None for EOS.
    """

    request: Request
    finish_reason: FinishReason
    token_ids: tuple[int, ...] = ()
    text: str = ""
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    seconds: float = 0.0
    error: str | None = None
    error_type: str | None = None
