"""What calibration texts say about a checkpoint: its activations' maxima, and from them its treatment.

All texts run through the layers one at a time, so that no more than one layer is in memory.
SmoothQuant's statistics are maxima, so that those of several shards of texts add up to the numbers of
all (`observe`, and `treat` with what others have seen); m2 and every error look at the inputs of the
texts at hand.

Texts are lists of token ids and are run one by one, so that padding cannot enter the statistics.
"""

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from quant.architecture import Architecture
from quant.checkpoint import EMBEDDINGS, Checkpoint, LinearGroup, linear_groups
from quant.config import QuantConfig
from quant.decoder import Apply, LayerTensors, apply_float, forward_layer, read_layer
from quant.int8 import activation_code
from quant.smooth import LayerSample, Scales, search_scales

Text = Sequence[int]

_LOGGER = logging.getLogger(__name__)

_BATCH_TOKENS = 2048  # Tokens of a layer's pass: bounds the memory of the widest activations.
_CHECK_TOKENS = 768  # Of the texts that scales are chosen by, at most a quarter of all.


@dataclass(frozen=True)
class ActivationStats:
    """The largest |x_j| [K] of every input channel, by (layer, group).

    `a + b` is what both saw: the elementwise maximum, hence exact in any order and grouping.
    """

    absmax: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)

    def __add__(self, other: "ActivationStats") -> "ActivationStats":
        merged = dict(self.absmax)
        for key, absmax_K in other.absmax.items():
            merged[key] = torch.maximum(merged[key], absmax_K) if key in merged else absmax_K
        return ActivationStats(merged)


@dataclass(frozen=True)
class GroupError:
    """What quantizing one group of linears costs, measured with its smoothing.

    `output` is the mean over tokens of |error|^2 / |output|^2, `stream` the same error relative to the
    residual stream that it ends up in: what groups are compared by.
    """

    layer: int
    group: str
    num_weights: int
    output: float
    stream: float


@dataclass(frozen=True)
class Treatment:
    """How a checkpoint is quantized: the scales of every layer, and the groups left in floating point."""

    scales: tuple[Scales, ...] = ()
    errors: tuple[GroupError, ...] = ()
    float_groups: frozenset[tuple[int, str]] = frozenset()


def observe(checkpoint: Checkpoint, texts: Sequence[Text]) -> ActivationStats:
    """The largest activations over `texts`."""
    stats = ActivationStats()
    for view in _walk(checkpoint, texts):
        stats += view.stats()
    return stats


def treat(
    checkpoint: Checkpoint,
    texts: Sequence[Text],
    config: QuantConfig,
    seen: ActivationStats | None = None,
) -> Treatment:
    """Search the scales of every layer; the recipe is `config.recipe`.

    Args:
        checkpoint: the original, in floating point.
        texts: to calibrate on.
        config: the recipe.
        seen: what `observe` found in other texts; of use to "smoothquant" alone.
    """
    checking = texts_to_check(texts)
    fitting = [i for i in range(len(texts)) if i not in checking] or checking
    fitted, checked = _rows_of(texts, fitting), _rows_of(texts, checking)
    all_scales: list[Scales] = []
    all_errors: list[GroupError] = []
    for view in _walk(checkpoint, texts):
        stats = view.stats() + (seen or ActivationStats())
        sample = LayerSample(
            layer=view.layer,
            architecture=checkpoint.architecture,
            index=view.index,
            absmax={group: stats.absmax[view.index, group] for group in view.inputs},
            fitted={group: x_TK[fitted] for group, x_TK in view.inputs.items()},
            checked={group: x_TK[checked] for group, x_TK in view.inputs.items()},
            lengths=[len(texts[i]) for i in checking],
            max_codes={
                group: activation_code(config, group, x_TK.shape[1])
                for group, x_TK in view.inputs.items()
            },
        )
        scales, errors = search_scales(sample, config.recipe, config.alpha, checkpoint.dtype)
        _LOGGER.info("layer %d of %d", view.index + 1, checkpoint.architecture.num_layers)
        all_scales.append(scales)
        all_errors += view.group_errors(errors, checkpoint.architecture)
    return Treatment(tuple(all_scales), tuple(all_errors))


@dataclass(frozen=True)
class _LayerView:
    """A layer at work on all texts: the inputs [T, K] of its groups, and how much of the residual stream
    behind it came from its attention and its MLP (mean over tokens of |added|^2 / |stream|^2).
    """

    index: int
    layer: LayerTensors
    inputs: dict[str, torch.Tensor]
    shares: dict[str, float]

    def stats(self) -> ActivationStats:
        """The layer's maxima."""
        return ActivationStats(
            {(self.index, group): x_TK.abs().amax(dim=0) for group, x_TK in self.inputs.items()}
        )

    def group_errors(
        self, errors: dict[str, float], architecture: Architecture
    ) -> Iterator[GroupError]:
        """Errors reach the stream through o_proj and down_proj, where they are as large relatively."""
        for group in linear_groups(architecture):
            share = self.shares["o" if group.name in ("qkv", "o") else "down"]
            num_weights = sum(self.layer[f"{linear}.weight"].numel() for linear in group.linears)
            error = errors[group.name]
            yield GroupError(self.index, group.name, num_weights, error, error * share)


def _walk(checkpoint: Checkpoint, texts: Sequence[Text]) -> Iterator[_LayerView]:
    """Run all texts through the layers, one at a time."""
    architecture = checkpoint.architecture
    batches = list(_batches(texts))
    streams = [embed(checkpoint, batch) for batch in batches]
    for index in range(architecture.num_layers):
        layer = read_layer(checkpoint, index, torch.float32)
        apply = apply_float(layer, architecture)
        inputs: dict[str, list[torch.Tensor]] = {g.name: [] for g in linear_groups(architecture)}
        shares: dict[str, list[torch.Tensor]] = {"o": [], "down": []}
        for number, batch in enumerate(batches):
            added: dict[str, torch.Tensor] = {}
            lengths = [len(text) for text in batch]
            watch = _watching(apply, inputs, added)
            x_TC = forward_layer(layer, architecture, index, streams[number], lengths, watch)
            power_T = x_TC.square().sum(dim=1).clamp(min=1e-20)
            for group, of_layer in shares.items():
                of_layer.append(added[group].square().sum(dim=1) / power_T)
            streams[number] = x_TC
        yield _LayerView(
            index,
            layer,
            {group: torch.cat(parts) for group, parts in inputs.items()},
            {group: float(torch.cat(parts).mean()) for group, parts in shares.items()},
        )


def _watching(
    apply: Apply, inputs: dict[str, list[torch.Tensor]], outputs: dict[str, torch.Tensor]
) -> Apply:
    """`apply` that leaves inputs and outputs of every group behind."""

    def watch(group: LinearGroup, x_TK: torch.Tensor) -> torch.Tensor:
        inputs[group.name].append(x_TK)
        outputs[group.name] = apply(group, x_TK)
        return outputs[group.name]

    return watch


def embed(checkpoint: Checkpoint, texts: Sequence[Text]) -> torch.Tensor:
    """The residual stream [T, C] before the first layer, all texts one behind the other."""
    tokens = torch.tensor([token for text in texts for token in text])
    return checkpoint.read(EMBEDDINGS)[tokens].float()


def _batches(texts: Sequence[Text]) -> Iterator[list[Text]]:
    """The texts in order, in batches of about _BATCH_TOKENS."""
    batch: list[Text] = []
    for text in texts:
        batch.append(text)
        if sum(map(len, batch)) >= _BATCH_TOKENS:
            yield batch
            batch = []
    if batch:
        yield batch


def texts_to_check(texts: Sequence[Text]) -> list[int]:
    """Which texts scales are not fitted to but chosen by; evenly spread over all, one at least."""
    average = sum(map(len, texts)) / len(texts)
    count = min(len(texts) / 4, _CHECK_TOKENS / average)
    count = max(1, round(count))
    return [i * len(texts) // count for i in range(count)]


def _rows_of(texts: Sequence[Text], chosen: Sequence[int]) -> torch.Tensor:
    """Where the tokens of some texts stand among those of all."""
    starts = [0, *itertools.accumulate(len(text) for text in texts)]
    return torch.cat([torch.arange(starts[i], starts[i + 1]) for i in chosen])
