"""What the engine is told: how a row is sampled, and how rows share a worker."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

ProposerName = Literal["none", "ngram", "suffix"]
Device = Literal["cpu", "cuda", "npu"]
DraftLengths = Literal["budget", "fixed"]


def _one_or_many(value: Any) -> Any:
    """A lone string is one stop string; JSON has lists where the field is a tuple."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


class SamplingParams(BaseModel):
    """How one row's tokens are chosen and where they end; vLLM's names and meanings.

    Log-probabilities are those of the model itself, before temperature, penalties and filters.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: float = Field(0.0, ge=0, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Keep the likeliest tokens up to this mass.")
    top_k: int = Field(0, ge=-1, description="Keep the k likeliest tokens; 0 or -1 keeps all.")
    min_p: float = Field(
        0.0, ge=0, le=1, description="Drop tokens below this share of the likeliest."
    )
    max_tokens: int = Field(256, ge=1, description="The most tokens an answer may have.")
    min_tokens: int = Field(0, ge=0, description="No EOS and no stop before so many tokens.")
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_one_or_many)
    ] = Field((), description="Strings that end the answer; they are cut from its text.")
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (), description="Token ids that end the answer, beside EOS."
    )
    seed: int | None = Field(
        None,
        ge=0,
        lt=2**63,
        description="Seed of the row's samples. A row without its own gets one made from the run's "
        "seed and the row's id.",
    )
    n: int = Field(1, ge=1, le=4096, description="Samples per prompt.")
    logprobs: int | None = Field(
        None, ge=0, le=100, description="Also return so many top log-probabilities a token."
    )
    repetition_penalty: float = Field(1.0, gt=0, description="Above 1 discourages seen tokens.")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="Per token already generated.")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="Per earlier occurrence.")
    ignore_eos: bool = Field(False, description="Go on past EOS.")

    @model_validator(mode="after")
    def _check_lengths(self) -> "SamplingParams":
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        return self


class EngineConfig(BaseModel):
    """How a worker batches rows and drafts tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_num_seqs: int = Field(16, ge=1, le=4096, description="Rows a worker generates at once.")
    max_num_batched_tokens: int = Field(
        512, ge=1, description="Prompt tokens a pass may add to the decoding rows' tokens."
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Longest prompt plus answer, in tokens; None: the model's own limit.",
    )
    proposer: ProposerName = Field("suffix", description="Where drafts come from.")
    num_speculative_tokens: int = Field(5, ge=0, le=64, description="Most tokens drafted per step.")
    draft_lengths: DraftLengths = Field(
        "budget",
        description="budget: as many drafted tokens as are worth their measured price, which may be "
        "none; fixed: all that is proposed.",
    )
    suffix_pool_tokens: int = Field(
        200_000,
        ge=0,
        description="Tokens of a worker's rows that the suffix proposer drafts from, before it begins "
        "anew; 0: each row drafts from itself only.",
    )
    prompt_lookup_max: int = Field(3, ge=1, le=16, description="Longest n-gram looked up.")
    prompt_lookup_min: int = Field(1, ge=1, le=16, description="Shortest n-gram looked up.")

    @property
    def num_spec_tokens(self) -> int:
        """The most that may be drafted per step: nothing without a proposer."""
        return 0 if self.proposer == "none" else self.num_speculative_tokens

    @property
    def has_budget(self) -> bool:
        """Whether drafts are cut to what they are worth."""
        return self.num_spec_tokens > 0 and self.draft_lengths == "budget"

    @model_validator(mode="after")
    def _check_lookup(self) -> "EngineConfig":
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError("prompt_lookup_min exceeds prompt_lookup_max")
        return self
