"""The run's configuration: one frozen object, echoed into the output folder."""

import hashlib
import json
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from pipeline.cluster import ClusterConfig
from pipeline.errors import describe
from quant.config import Precision, QuantConfig
from workers.config import EngineConfig, SamplingParams

Resume = Literal["never", "always", "if-possible"]
TooLong = Literal["refuse", "truncate-left", "truncate-right"]


class DataConfig(BaseModel):
    """Which rows are read, and how they are cut into shards."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    limit: int | None = Field(None, ge=1, description="Read only so many rows, in file order.")
    prompt_column: str | None = Field(
        None, min_length=1, description="Column that holds the prompt; None: `prompt`."
    )
    prompt_template: str | None = Field(
        None,
        description="Jinja template of the prompt, over the row's columns (`prompt` is what "
        "prompt_column names): 'Sum up: {{ prompt }}'.",
    )
    chat: bool = Field(
        False, description="Send prompts as a user's message, through the model's chat template."
    )
    system_prompt: str | None = Field(
        None,
        min_length=1,
        description="System message of rows that have none; prompts become chats with it.",
    )
    too_long: TooLong = Field(
        "refuse",
        description="Prompts that leave no room for an answer: refused; or cut, so that max_tokens fit "
        "(or half of max_model_len), at the beginning or at the end.",
    )
    share_duplicates: bool = Field(
        False,
        description="Rows with the prompt and the parameters of an earlier row get its answers; else "
        "they are generated like all, with a seed of their own.",
    )
    rows_per_shard: int = Field(
        256,
        ge=1,
        description="Rows of a full shard. A file's first shards are smaller (8, 16, 32, ...), so "
        "that the first parts are there early.",
    )

    @property
    def makes_chats(self) -> bool:
        """Whether prompts become messages: a system message needs another to stand before."""
        return self.chat or self.system_prompt is not None


class RunConfig(BaseModel):
    """Everything a run depends on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        min_length=1, description="Folder of a Hugging Face checkpoint, or a hub id."
    )
    input: tuple[str, ...] = Field(
        min_length=1,
        description="Prompt files, folders, globs (paths or URIs), or hf://NAME[:SPLIT].",
    )
    output: str = Field(min_length=1, description="Folder (path or URI) of the data set.")
    resume: Resume = Field(
        "if-possible",
        description="never: the folder must be empty; always: it must hold a run to go on with; "
        "if-possible: go on with what it holds, or begin.",
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="Seed of the run; each row without its own derives one from it.",
    )
    max_error_rate: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of failed samples above which a run stops, or ends with exit code 3.",
    )
    sampling: SamplingParams = SamplingParams()
    engine: EngineConfig = EngineConfig()
    quant: QuantConfig = QuantConfig()
    data: DataConfig = DataConfig()
    cluster: ClusterConfig = ClusterConfig()

    @field_validator("input", mode="before")
    @classmethod
    def _one_input(cls, value: Any) -> Any:
        """A single file needs no list."""
        return (value,) if isinstance(value, str) else value

    def identity(self) -> dict[str, Any]:
        """What the rows and their tokens depend on, flat; two runs that agree may share an output.

        The model counts by its content, and the input by what was planned: see `pipeline.plan`.
        """
        nested = {
            "seed": self.seed,
            "sampling": self.sampling.model_dump(mode="json"),
            "quant": self.quant.model_dump(mode="json"),
            "data": self.data.model_dump(mode="json"),
            "engine": {"max_model_len": self.engine.max_model_len},
        }
        return _flatten(nested)

    def flat(self) -> dict[str, Any]:
        """Every key by its whole name (`sampling.top_p`)."""
        return _flatten(self.model_dump(mode="json"))

    def digest(self) -> str:
        """sha256 (hex) of the identity."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_yaml(cls, content: bytes) -> "RunConfig":
        """The configuration that `to_yaml` wrote; raises ValueError, saying what is wrong with it."""
        try:
            return cls.model_validate(yaml.safe_load(content))
        except ValidationError as error:
            raise ValueError(describe(error)) from error
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error

    def to_yaml(self) -> str:
        """The resolved configuration; feeding it to --config gives the same run."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class QuantizeConfig(BaseModel):
    """Everything a conversion depends on, and what it is measured by."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        min_length=1, description="Folder of a Hugging Face checkpoint, or a hub id."
    )
    output: str = Field(min_length=1, description="Folder to write; must not exist, or be empty.")
    evaluate: tuple[str, ...] = Field(
        (),
        description="Prompt files to measure fidelity on, held out from calibration. Rows with an "
        "`answer` (a number) or with a `test` and an `entry_point` (Python) are graded, too; tests run "
        "in processes of their own.",
    )
    num_evaluation_samples: int = Field(32, ge=1, description="Rows used of each of them.")
    max_tokens: int = Field(64, ge=2, description="Tokens of an answer that is measured or graded.")
    quant: QuantConfig = QuantConfig()

    @field_validator("evaluate", mode="before")
    @classmethod
    def _one_file(cls, value: Any) -> Any:
        """A single file needs no list."""
        return (value,) if isinstance(value, str) else value

    @field_validator("quant")
    @classmethod
    def _is_w8a8(cls, value: QuantConfig) -> QuantConfig:
        if value.precision != "w8a8":
            raise ValueError("quantize writes w8a8; no other precision")
        return value


class BenchConfig(BaseModel):
    """A benchmark: every combination of precision, drafts, batch size and temperature is an arm."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        min_length=1, description="Folder of a Hugging Face checkpoint, or a hub id."
    )
    input: tuple[str, ...] = Field(min_length=1, description="Prompt files; paths or URIs.")
    output: str = Field(min_length=1, description="Folder to write; must not exist, or be empty.")
    num_prompts: int = Field(16, ge=1, description="Prompts used, evenly over all files.")
    max_tokens: int = Field(96, ge=2, description="The most tokens an answer may have.")
    seed: int = Field(0, ge=0, lt=2**63, description="Of sampled answers.")
    precisions: tuple[Literal["bf16", "w8a8"], ...] = Field(
        ("bf16", "w8a8"), min_length=1, description="Of the verifying model."
    )
    drafts: tuple[str, ...] = Field(
        ("none", "ngram:3", "ngram:5", "ngram:budget", "suffix:budget"),
        min_length=1,
        description="PROPOSER, with a fixed draft length or `budget` behind a colon: none, ngram:5, "
        "suffix:budget, ...",
    )
    batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (1, 16), min_length=1, description="Rows generated at once."
    )
    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        (0.0,), min_length=1, description="0 is greedy."
    )
    num_repeats: int = Field(5, ge=1, description="Runs of every arm, interleaved.")
    num_threads: int | None = Field(None, ge=1, description="Of the engine; None: every core.")
    num_speculative_tokens: int = Field(5, ge=1, le=64, description="Most drafted under `budget`.")
    quant: QuantConfig = QuantConfig()

    @field_validator("input", "precisions", "drafts", "batch_sizes", "temperatures", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        """A single value needs no list."""
        return value if isinstance(value, list | tuple) else (value,)

    @field_validator("drafts")
    @classmethod
    def _are_drafts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            engine_config(name, 5)
        return value


def recipe_of(config: BenchConfig, precision: Precision) -> QuantConfig:
    """The weights of a benchmark's precision."""
    return config.quant if precision == "w8a8" else QuantConfig(precision=precision)


def engine_config(drafts: str, budget_cap: int, **other: Any) -> EngineConfig:
    """The engine's configuration for drafts as a benchmark names them; raises ValueError."""
    proposer, _, length = drafts.partition(":")
    keys: dict[str, Any] = {"proposer": proposer, **other}
    if proposer != "none" or length:
        if length == "budget":
            keys |= {"draft_lengths": "budget", "num_speculative_tokens": budget_cap}
        elif length.isdecimal() and proposer != "none" and int(length) > 0:
            keys |= {"draft_lengths": "fixed", "num_speculative_tokens": int(length)}
        else:
            raise ValueError(f"{drafts!r}: expected PROPOSER:LENGTH, PROPOSER:budget or none")
    return EngineConfig.model_validate(keys)


def _flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
