"""Configurations to parts: proposers, a model in this process, an engine around a model."""

from quant.checkpoint import Checkpoint
from quant.config import QuantConfig
from quant.convert import convert
from workers.budget import DraftBudget
from workers.config import EngineConfig
from workers.engine import Engine, EngineLimits
from workers.model import TargetModel, build_backend
from workers.ngram import NgramProposer
from workers.proposer import NoProposer, ProposerFactory
from workers.step_times import StepTimes
from workers.stopping import Detokenizer
from workers.suffix import SuffixPool


def build_proposer(config: EngineConfig) -> ProposerFactory:
    """The factory of the configured proposer; its rows share what that proposer lets them share."""
    match config.proposer:
        case "none":
            return lambda _request: NoProposer()
        case "ngram":
            return lambda _request: NgramProposer(
                config.prompt_lookup_min, config.prompt_lookup_max
            )
        case "suffix":
            return SuffixPool(config.suffix_pool_tokens).new_proposer


def load_model(checkpoint: Checkpoint, config: QuantConfig, max_len: int) -> TargetModel:
    """Convert a checkpoint in this process; rows of the model have up to `max_len` positions."""
    pieces = list(convert(checkpoint, config))
    return TargetModel(checkpoint.architecture, pieces, build_backend(config.precision), max_len)


def build_engine(
    model: TargetModel,
    config: EngineConfig,
    max_model_len: int,
    text: Detokenizer,
    times: StepTimes | None = None,
) -> Engine:
    """An engine with rows of up to `max_model_len` positions.

    `times` are what a budget for drafts is made from; without them every draft is verified in full.
    """
    limits = EngineLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        num_spec_tokens=config.num_spec_tokens,
    )
    budget = None if times is None else DraftBudget(times)
    return Engine(model, limits, build_proposer(config), text, budget)
