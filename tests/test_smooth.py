"""Smoothing: what is folded changes nothing, and the scales that are searched are worth folding."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from quant.architecture import Architecture
from quant.calibrate import Treatment
from quant.checkpoint import Checkpoint, open_checkpoint
from quant.config import QuantConfig, Recipe
from quant.decoder import LayerTensors, apply_float, forward_layer, read_layer, rms_norm
from quant.quantize import layer_tensors
from quant.refine import _gradient, refine_scales
from quant.smooth import LayerSample, Scales, search_scales, smooth_
from tests.tiny import FAMILIES, make_checkpoint, make_prompts, num_threads

GROUPS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
NORMS = {"qkv": "input_layernorm.weight", "gate_up": "post_attention_layernorm.weight"}
ODD = {
    "hidden_size": 40,
    "intermediate_size": 50,
    "head_dim": 10,
    "vocab_size": 157,
    "eos_token_id": 7,
}
BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama-biases": ("llama", BIASES),
    "llama-biases-odd-sizes": ("llama", BIASES | ODD),
    "llama-multi-head": ("llama", BIASES | {"num_key_value_heads": 4}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "mistral-window": ("mistral", {"sliding_window": 5}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
}
LENGTHS = (40, 24)  # Of the texts that errors are measured on.
SUBSETS = [subset for n in range(4) for subset in itertools.combinations(GROUPS, n)]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with num_threads(1):
        yield


@pytest.fixture(scope="module", params=MODELS, ids=str)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    family, overrides = MODELS[request.param]
    return open_checkpoint(make_checkpoint(tmp_path_factory.mktemp("model"), family, **overrides))


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Biases and norm gains of both signs everywhere; two query heads for each of two value heads."""
    return open_checkpoint(make_checkpoint(tmp_path_factory.mktemp("biased"), "llama", **BIASES))


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2", "qwen3"])
def searched(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    """One layer of every family, no attention so peaked that a code decides where it looks."""
    family = request.param
    overrides = {"mistral": {"sliding_window": 7}, "llama": BIASES}.get(family, {})
    folder = tmp_path_factory.mktemp(f"searched-{family}")
    return open_checkpoint(
        make_checkpoint(folder, family, num_hidden_layers=1, std=0.1, **overrides)
    )


def weight_of(layer: LayerTensors, group: str) -> torch.Tensor:
    return torch.cat([layer[f"{linear}.weight"] for linear in GROUPS[group]])


def bias_of(layer: LayerTensors, group: str) -> torch.Tensor | None:
    if f"{GROUPS[group][0]}.bias" not in layer:
        return None
    return torch.cat([layer[f"{linear}.bias"] for linear in GROUPS[group]])


def num_inputs(layer: LayerTensors, group: str) -> int:
    return layer[f"{GROUPS[group][0]}.weight"].shape[1]


# --- Folding ---


def random_scales(a: Architecture, seed: int) -> Scales:
    """Scales over e ** +-3 or so; equal over the query heads of one value head."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).exp()

    per_kv_head = draw(a.num_kv_heads, 1, a.head_dim)
    repeats = a.num_heads // a.num_kv_heads
    return {
        "qkv": draw(a.hidden_size),
        "o": per_kv_head.expand(-1, repeats, -1).flatten(),
        "gate_up": draw(a.hidden_size),
        "down": draw(a.intermediate_size),
    }


def run_layers(
    checkpoint: Checkpoint, layers: Sequence[LayerTensors], texts: Sequence[list[int]]
) -> tuple[torch.Tensor, list[dict[str, torch.Tensor]]]:
    """Float64 logits of all texts, and the inputs of every layer's groups."""
    a = checkpoint.architecture
    tokens = torch.tensor([token for text in texts for token in text])
    embeddings_VC = checkpoint.read("model.embed_tokens.weight").double()
    head = "model.embed_tokens.weight" if a.tied_head else "lm_head.weight"
    x_TC, inputs = embeddings_VC[tokens], []
    for index, layer in enumerate(layers):
        apply = apply_float(layer, a)
        seen: dict[str, torch.Tensor] = {}

        def watch(
            group: Any, x: torch.Tensor, apply: Any = apply, seen: Any = seen
        ) -> torch.Tensor:
            seen[group.name] = x
            result: torch.Tensor = apply(group, x)
            return result

        x_TC = forward_layer(layer, a, index, x_TC, [len(text) for text in texts], watch)
        inputs.append(seen)
    normed_TC = rms_norm(x_TC, checkpoint.read("model.norm.weight").double(), a.norm_eps)
    return F.linear(normed_TC, checkpoint.read(head).double()), inputs


def float64_layers(checkpoint: Checkpoint) -> list[LayerTensors]:
    count = checkpoint.architecture.num_layers
    return [read_layer(checkpoint, index, torch.float64) for index in range(count)]


def kill_channels_(layer: LayerTensors) -> None:
    """Zero gains, channels without weights, channels that are never active."""
    for norm in NORMS.values():
        layer[norm][[0, 3]] = 0
    for linears in GROUPS.values():
        for linear in linears:
            layer[f"{linear}.weight"][:, [3, 5]] = 0
    for linear in ("self_attn.v_proj", "mlp.up_proj"):
        layer[f"{linear}.weight"][[1, 5]] = 0
        if f"{linear}.bias" in layer:
            layer[f"{linear}.bias"][[1]] = 0


@pytest.mark.parametrize("dead", [False, True], ids=["alive", "dead channels"])
def test_smoothing_changes_inputs_and_no_output(checkpoint: Checkpoint, dead: bool) -> None:
    a = checkpoint.architecture
    texts = make_prompts([11, 1, 7], a.vocab_size)
    layers = float64_layers(checkpoint)
    assert any((layer[norm] < 0).any() for layer in layers for norm in NORMS.values())
    if dead:
        for layer in layers:
            kill_channels_(layer)
    before, inputs = run_layers(checkpoint, layers, texts)
    all_scales = [random_scales(a, seed) for seed in range(len(layers))]
    for layer, scales in zip(layers, all_scales, strict=True):
        smooth_(layer, a, scales)
    after, smoothed_inputs = run_layers(checkpoint, layers, texts)

    assert float(before.abs().max()) > 1
    assert float((after - before).abs().max()) < 1e-9 * float(before.abs().max())
    for scales, old, new in zip(all_scales, inputs, smoothed_inputs, strict=True):
        for group in GROUPS:  # What quantization will see did change.
            expected = old[group] / scales[group]
            error = float((new[group] - expected).abs().max())
            assert error < 1e-9 * float(expected.abs().max())
            if dead:
                assert (old[group] == 0).all(dim=0).any()


def test_a_smoothed_layer_by_hand(tmp_path: Path) -> None:
    overrides: dict[str, Any] = {
        "hidden_size": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    folder = make_checkpoint(
        tmp_path,
        "llama",
        head_dim=2,
        intermediate_size=3,
        num_hidden_layers=1,
        **overrides,
        **BIASES,
    )
    checkpoint = open_checkpoint(folder)
    layer = read_layer(checkpoint, 0, torch.float32)
    layer["input_layernorm.weight"] = torch.tensor([2.0, -1.0, 0.0, 8.0])
    layer["self_attn.q_proj.weight"][0] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    layer["self_attn.v_proj.weight"] = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    layer["self_attn.v_proj.bias"] = torch.tensor([1.0, -3.0])
    layer["self_attn.o_proj.weight"][3] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    scales = {"qkv": torch.tensor([2.0, 4.0, 0.5, 1.0]), "o": torch.tensor([0.25, 2.0, 0.25, 2.0])}
    smooth_(layer, checkpoint.architecture, scales)
    expected = {
        "input_layernorm.weight": [1.0, -0.25, 0.0, 8.0],
        "self_attn.v_proj.weight": [[8.0, 32.0, 6.0, 16.0], [5.0, 12.0, 1.75, 4.0]],
        "self_attn.v_proj.bias": [4.0, -1.5],
    }
    assert {name: layer[name].tolist() for name in expected} == expected
    assert layer["self_attn.q_proj.weight"][0].tolist() == [2.0, 8.0, 1.5, 4.0]
    assert layer["self_attn.o_proj.weight"][3].tolist() == [0.25, 4.0, 0.75, 8.0]


@pytest.mark.parametrize("groups", SUBSETS, ids=lambda groups: "+".join(groups) or "none")
def test_scales_for_some_groups(biased: Checkpoint, groups: tuple[str, ...]) -> None:
    a = biased.architecture
    texts = make_prompts([9, 4], a.vocab_size)
    layers = float64_layers(biased)
    originals = [dict(layer) for layer in layers]
    before, inputs = run_layers(biased, layers, texts)
    scales = {name: s for name, s in random_scales(a, 5).items() if name in groups}
    smooth_(layers[1], a, scales)
    after, smoothed_inputs = run_layers(biased, layers, texts)

    assert float((after - before).abs().max()) < 1e-9 * float(before.abs().max())
    for group in GROUPS:
        scale = scales.get(group, torch.ones(1, dtype=torch.float64))
        torch.testing.assert_close(
            smoothed_inputs[1][group], inputs[1][group] / scale, rtol=1e-9, atol=1e-9
        )
    touched = {
        "qkv": {"input_layernorm.weight"},
        "o": {"self_attn.v_proj.weight", "self_attn.v_proj.bias"},
        "gate_up": {"post_attention_layernorm.weight"},
        "down": {"mlp.up_proj.weight", "mlp.up_proj.bias"},
    }
    for group, linears in GROUPS.items():
        touched[group] |= {f"{linear}.weight" for linear in linears}
    expected = set().union(*(touched[group] for group in groups))
    changed = {n for n, tensor in layers[1].items() if not torch.equal(tensor, originals[1][n])}
    assert changed == expected


# --- The search, against loops over tokens and heads ---


def make_sample(
    checkpoint: Checkpoint, *, outliers: float = 1.0, spread: float = 0.0, tokens: int = 160
) -> LayerSample:
    """Random inputs for layer 0; three channels of each are `outliers` times the others."""
    a = checkpoint.architecture
    layer = read_layer(checkpoint, 0, torch.float32)
    generator = torch.Generator().manual_seed(7)
    inputs = {}
    for group in GROUPS:
        count = num_inputs(layer, group)
        size_K = (spread * torch.randn(count, generator=generator)).exp()
        size_K[[2, 9, count - 1]] *= outliers
        inputs[group] = torch.randn(tokens, count, generator=generator) * size_K
    few = sum(LENGTHS)
    absmax = {group: x_TK.abs().amax(dim=0) for group, x_TK in inputs.items()}
    measured = {group: x_TK[:few] for group, x_TK in inputs.items()}
    return LayerSample(layer, a, 0, absmax, inputs, measured, LENGTHS, dict.fromkeys(GROUPS, 127))


def naive_rows(x_MK: torch.Tensor) -> torch.Tensor:
    """Every row in 127 steps to either side."""
    rows = []
    for row_K in x_MK.double():
        step = float(row_K.abs().max()) / 127 or 1.0
        rows.append((row_K / step).round() * step)
    return torch.stack(rows)


def naive_attention(sample: LayerSample, qkv_TJ: torch.Tensor) -> torch.Tensor:
    """One text, one head, one query at a time."""
    a, layer = sample.architecture, sample.layer
    dim, repeats = a.head_dim, a.num_heads // a.num_kv_heads
    window = a.windows[sample.index]

    def head(row_J: torch.Tensor, number: int, position: int, gain: str | None) -> torch.Tensor:
        part = row_J[number * dim : (number + 1) * dim].clone()
        if gain is not None and a.qk_norm:
            part = part / (part.square().mean() + a.norm_eps).sqrt()
            part = part * layer[f"self_attn.{gain}.weight"].double()
        if gain is not None:
            for i, frequency in enumerate(a.rope_inv_freq):
                j, angle = i + dim // 2, position * frequency
                low, high = float(part[i]), float(part[j])
                part[i] = low * math.cos(angle) - high * math.sin(angle)
                part[j] = high * math.cos(angle) + low * math.sin(angle)
        return part

    results, start = [], 0
    for length in sample.lengths:
        text = qkv_TJ[start : start + length]
        start += length
        first_key, first_value = a.num_heads, a.num_heads + a.num_kv_heads
        out = torch.zeros(length, a.num_heads * dim, dtype=torch.float64)
        for number in range(a.num_heads):
            shared = number // repeats
            queries = [head(row, number, p, "q_norm") for p, row in enumerate(text)]
            keys = torch.stack(
                [head(row, first_key + shared, p, "k_norm") for p, row in enumerate(text)]
            )
            values = torch.stack([head(row, first_value + shared, 0, None) for row in text])
            for p, query in enumerate(queries):
                first = max(0, p + 1 - window) if window else 0
                scores = keys[first : p + 1] @ query / math.sqrt(dim)
                out[p, number * dim : (number + 1) * dim] = (
                    scores.softmax(dim=0) @ values[first : p + 1]
                )
        results.append(out)
    return torch.cat(results)


def naive_error(sample: LayerSample, group: str, scale_K: torch.Tensor) -> float:
    """The mean over tokens of |error| ** 2 / |output| ** 2 of what the group feeds."""
    x_TK, weight_JK = sample.checked[group].double(), weight_of(sample.layer, group).double()
    bias_J = bias_of(sample.layer, group)
    bias_J = torch.zeros(len(weight_JK)) if bias_J is None else bias_J
    rounded_TJ = naive_rows(x_TK / scale_K) @ naive_rows(weight_JK * scale_K).T + bias_J.double()
    both = [x_TK @ weight_JK.T + bias_J.double(), rounded_TJ]
    if group == "qkv":
        both = [naive_attention(sample, y_TJ) for y_TJ in both]
    if group == "gate_up":
        half = len(weight_JK) // 2
        both = [y[:, :half] * torch.sigmoid(y[:, :half]) * y[:, half:] for y in both]
    shares = [
        float((got - wanted).square().sum() / wanted.square().sum())
        for wanted, got in zip(*both, strict=True)
    ]
    return sum(shares) / len(shares)


def test_rounding_to_nearest_has_no_scales_and_the_error_of_its_definition(
    searched: Checkpoint,
) -> None:
    sample = make_sample(searched, spread=0.5)
    scales, errors = search_scales(sample, "rtn", None, torch.float32)
    assert scales == {}
    assert errors.keys() == GROUPS.keys()
    for group, error in errors.items():
        expected = naive_error(sample, group, torch.ones(num_inputs(sample.layer, group)))
        assert error == pytest.approx(expected, rel=0.02), group
        assert error > 1e-6


def test_errors_of_wide_groups_are_measured_on_evenly_spread_outputs(
    biased: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = make_sample(biased)
    monkeypatch.setattr("quant.smooth._MAX_OUTPUTS", 4)
    _, errors = search_scales(sample, "rtn", None, torch.float32)
    # Four of 64 outputs and of 96, from the first to the last.
    kept = {"o": [0, 21, 42, 63], "gate_up": [0, 32, 63, 95], "down": [0, 21, 42, 63]}
    assert pytest.approx((31.67, 63.33), abs=0.01) == (95 / 3, 2 * 95 / 3)  # The nearest to these.
    for group, rows in kept.items():
        layer = dict(sample.layer)
        for linear in GROUPS[group]:
            for part in ("weight", "bias"):
                layer[f"{linear}.{part}"] = layer[f"{linear}.{part}"][rows]
        few = replace(sample, layer=layer)
        expected = naive_error(few, group, torch.ones(num_inputs(sample.layer, group)))
        assert errors[group] == pytest.approx(expected, rel=0.02), group
    whole = naive_error(sample, "qkv", torch.ones(64))  # Attention needs all of its own.
    assert errors["qkv"] == pytest.approx(whole, rel=0.02)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.85, 1.0])
def test_smoothquant_is_its_formula(searched: Checkpoint, alpha: float) -> None:
    sample = make_sample(searched, spread=1.0)
    # The maxima are those of more texts than the errors are measured on.
    sample = replace(sample, absmax={g: 1.5 * m + 0.1 for g, m in sample.absmax.items()})
    scales, errors = search_scales(sample, "smoothquant", alpha, torch.float32)
    a = sample.architecture
    repeats = a.num_heads // a.num_kv_heads
    for group in GROUPS:
        weight_JK, absmax_K = weight_of(sample.layer, group), sample.absmax[group]
        count = len(absmax_K)
        maxima = []
        for k in range(count):
            channels = [k]
            if group == "o":  # All query heads of this one's key/value head.
                kv_head, within = k // a.head_dim // repeats, k % a.head_dim
                heads = range(kv_head * repeats, (kv_head + 1) * repeats)
                channels = [head * a.head_dim + within for head in heads]
            largest = max(float(absmax_K[c]) for c in channels)
            maxima.append((largest, max(float(weight_JK[:, c].abs().max()) for c in channels)))
        wanted = [x**alpha / w ** (1 - alpha) for x, w in maxima]
        mean = math.exp(sum(math.log(s) for s in wanted) / count)
        expected = torch.tensor([s / mean for s in wanted])
        torch.testing.assert_close(scales[group], expected, rtol=1e-4, atol=0)
        assert float(scales[group].max() / scales[group].min()) > 1.1
        if group != "qkv":
            assert errors[group] == pytest.approx(
                naive_error(sample, group, scales[group]), rel=0.02
            )
    assert errors["qkv"] == pytest.approx(naive_error(sample, "qkv", scales["qkv"]), rel=0.02)


@pytest.mark.parametrize("recipe", ["smoothquant", "m2"])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_query_heads_of_a_value_head_share_their_scales(
    tmp_path: Path, recipe: Recipe, num_kv_heads: int
) -> None:
    folder = make_checkpoint(
        tmp_path, "llama", num_hidden_layers=1, num_key_value_heads=num_kv_heads
    )
    sample = make_sample(open_checkpoint(folder), outliers=40, spread=1)
    scales, _ = search_scales(sample, recipe, None, torch.float32)
    heads = scales["o"].view(num_kv_heads, 4 // num_kv_heads, 16)
    assert torch.equal(heads, heads[:, :1].expand_as(heads))
    assert len(scales["o"].unique()) > 8
    if num_kv_heads < 4:
        assert float(sample.absmax["o"].view_as(heads).std(dim=1).min()) > 0


def actual_errors(
    sample: LayerSample, recipe: Recipe, alpha: float | None = None
) -> dict[str, float]:
    """Errors measured here with the scales that came back; those reported must be the same."""
    scales, reported = search_scales(sample, recipe, alpha, torch.float32)
    errors = {}
    for group in GROUPS:
        scale_K = scales.get(group, torch.ones(num_inputs(sample.layer, group)))
        errors[group] = naive_error(sample, group, scale_K)
        assert reported[group] == pytest.approx(errors[group], rel=0.02), group
    return errors


def test_every_recipe_is_at_least_as_good_as_the_simpler_one(searched: Checkpoint) -> None:
    for spread in (0.0, 1.0):
        sample = make_sample(searched, spread=spread)
        nearest, smoothed, m2 = (
            actual_errors(sample, recipe) for recipe in ("rtn", "smoothquant", "m2")
        )
        slack = 1 + 1e-3  # For a code at an edge that the naive sums put on the other side.
        for group in GROUPS:
            assert m2[group] <= nearest[group] * slack
            assert m2[group] <= smoothed[group] * 1.1  # Another rule; equals without heavy tails.
            assert smoothed[group] <= nearest[group] * slack
        if spread:
            assert all(smoothed[group] < 0.8 * nearest[group] for group in GROUPS)


def test_a_searched_exponent_is_at_least_as_good_as_any_of_a_few(biased: Checkpoint) -> None:
    sample = make_sample(biased, spread=1.0)
    _, best = search_scales(sample, "smoothquant", None, torch.float32)
    for alpha in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        _, errors = search_scales(sample, "smoothquant", alpha, torch.float32)
        assert all(best[group] <= errors[group] for group in GROUPS)


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 0.75, 0.9, 1.0])
def test_m2_starts_from_its_formula(
    searched: Checkpoint, alpha: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = make_sample(searched, spread=1.0, tokens=90)
    monkeypatch.setattr("quant.smooth._CHUNK", 32)
    monkeypatch.setattr("quant.smooth._THRESHOLDS", ())
    monkeypatch.setattr("quant.smooth.refine_scales", lambda x_TK, weight_JK, scale_K: scale_K)
    scales, _ = search_scales(sample, "m2", alpha, torch.float32)
    a = sample.architecture
    repeats = a.num_heads // a.num_kv_heads
    power = min(max(2 * alpha / (1 - alpha), 1), 128) if alpha < 1 else 128
    for group in GROUPS:
        x_TK, weight_JK = sample.fitted[group].double(), weight_of(sample.layer, group).double()
        norm_K = weight_JK.square().sum(dim=0).sqrt()
        x_TK = x_TK.abs() / (x_TK.square() * norm_K.square()).sum(dim=1, keepdim=True).sqrt()
        wanted = []
        for k in range(x_TK.shape[1]):
            channels = [k]
            if group == "o":  # All query heads of this one's key/value head.
                kv_head, within = k // a.head_dim // repeats, k % a.head_dim
                heads = range(kv_head * repeats, (kv_head + 1) * repeats)
                channels = [head * a.head_dim + within for head in heads]
            inputs = sum(float((x_TK[:, c] ** power).sum()) for c in channels) ** (1 / power)
            weights = sum(float(norm_K[c] ** 2) for c in channels) ** 0.5
            wanted.append(inputs**alpha / weights ** (1 - alpha))
        mean = math.exp(sum(math.log(s) for s in wanted) / len(wanted))
        expected = torch.tensor([s / mean for s in wanted])
        torch.testing.assert_close(scales[group], expected, rtol=1e-3, atol=0)
        assert float(scales[group].max() / scales[group].min()) > 1.1


def test_m2_is_no_worse_than_the_alpha_that_is_given(
    biased: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = make_sample(biased, spread=1.0)
    for alpha in (0.1, 0.5):
        _, better = search_scales(sample, "m2", alpha, torch.float32)
        with monkeypatch.context() as patch:
            patch.setattr("quant.smooth._THRESHOLDS", ())
            patch.setattr("quant.smooth.refine_scales", lambda x_TK, weight_JK, scale_K: scale_K)
            _, given = search_scales(sample, "m2", alpha, torch.float32)
        assert all(better[group] <= given[group] for group in GROUPS)
        assert sum(better.values()) < 0.99 * sum(given.values())


def test_scales_are_fitted_to_some_texts_and_chosen_by_others(biased: Checkpoint) -> None:
    # Fitted to texts in which other channels stand out, m2 sees that no smoothing is better.
    sample = make_sample(biased)
    misleading = {}
    for group, x_TK in sample.fitted.items():
        misleading[group] = x_TK.clone()
        misleading[group][:, ::2] *= 100
    sample = replace(sample, fitted=misleading)
    scales, errors = search_scales(sample, "m2", None, torch.float32)
    _, nearest = search_scales(sample, "rtn", None, torch.float32)
    for group in ("o", "down"):
        assert errors[group] <= nearest[group]
        assert float(scales[group].max() / scales[group].min()) < 3


def test_channels_that_rarely_fire_are_smoothed_for_texts_to_come(biased: Checkpoint) -> None:
    # Heavy tails, and hardly more tokens than channels: maxima say little of other tokens' maxima.
    a = biased.architecture
    generator = torch.Generator().manual_seed(3)
    layer = read_layer(biased, 0, torch.float32)
    size_K = (0.7 * torch.randn(a.intermediate_size, generator=generator)).exp()

    def draw(tokens: int) -> torch.Tensor:
        normal_TK = torch.randn(tokens, a.intermediate_size, generator=generator)
        return normal_TK.sign() * normal_TK.abs() ** 3 * size_K

    sample = make_sample(biased)
    parts = {"fitted": draw(120), "checked": draw(sum(LENGTHS))}
    unseen_TK = draw(2000)
    sample = replace(
        sample,
        absmax=sample.absmax | {"down": torch.cat([*parts.values()]).abs().amax(dim=0)},
        fitted=sample.fitted | {"down": parts["fitted"]},
        checked=sample.checked | {"down": parts["checked"]},
    )
    errors = {}
    recipes: tuple[Recipe, ...] = ("rtn", "smoothquant", "m2")
    for recipe in recipes:
        scales, _ = search_scales(sample, recipe, None, torch.float32)
        scale_K = scales.get("down", torch.ones(a.intermediate_size))
        errors[recipe] = measured_error(unseen_TK, layer["mlp.down_proj.weight"], scale_K)
    assert errors["m2"] < 0.95 * errors["smoothquant"] < 0.95 * errors["rtn"]


def test_outlier_channels_are_smoothed_away(searched: Checkpoint) -> None:
    sample = make_sample(searched, outliers=60)
    nearest, m2 = actual_errors(sample, "rtn"), actual_errors(sample, "m2")
    for group in GROUPS:
        assert m2[group] < nearest[group] / 3, group


# --- What has to be stored ---


@pytest.mark.parametrize("recipe", ["smoothquant", "m2"])
def test_smoothed_gains_are_exact_in_bfloat16(searched: Checkpoint, recipe: Recipe) -> None:
    sample = make_sample(searched, outliers=30, spread=0.5)
    layer = {name: tensor.bfloat16().float() for name, tensor in sample.layer.items()}
    for norm in NORMS.values():
        layer[norm][[1, 6]] = 0
    sample = replace(sample, layer=layer)
    scales, _ = search_scales(sample, recipe, None, torch.bfloat16)
    unsettled, _ = search_scales(sample, recipe, None, torch.float32)
    smoothed = dict(layer)
    smooth_(smoothed, sample.architecture, scales)
    for group, norm in NORMS.items():
        assert (scales[group] > 0).all()
        gain_K = smoothed[norm]
        # Nothing but the rounding of one float32 division is left to a bfloat16 value.
        torch.testing.assert_close(gain_K, gain_K.bfloat16().float(), rtol=2**-22, atol=0)
        alive = layer[norm] != 0
        assert int(alive.sum()) == len(alive) - 2
        torch.testing.assert_close(
            scales[group][alive], unsettled[group][alive], rtol=2**-8, atol=0
        )
        assert not torch.equal(scales[group][alive], unsettled[group][alive])
    for group in ("o", "down"):
        assert torch.equal(scales[group], unsettled[group])


def test_a_stored_bfloat16_layer_has_the_smoothed_gains(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.dtype == torch.bfloat16
    sample = make_sample(checkpoint, outliers=30, spread=0.5)
    scales, _ = search_scales(sample, "m2", None, checkpoint.dtype)
    layer = layer_tensors(checkpoint, QuantConfig(), Treatment((scales,)), 0)
    for group, norm in NORMS.items():
        assert layer[norm].dtype == torch.bfloat16
        restored_K = layer[norm].double() * scales[group].double()
        original_K = halves[f"model.layers.0.{norm}"].double()
        torch.testing.assert_close(restored_K, original_K, rtol=1e-6, atol=0)


@pytest.mark.parametrize("recipe", ["smoothquant", "m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_zero_gains_and_dead_channels_have_finite_scales(
    biased: Checkpoint, recipe: Recipe, dtype: torch.dtype
) -> None:
    sample = make_sample(biased, spread=1.0)
    kill_channels_(sample.layer)
    for group, x_TK in sample.fitted.items():
        x_TK[:, [0, 1, 17]] = 0
        sample.absmax[group][[0, 1, 17]] = 0
    scales, errors = search_scales(sample, recipe, None, dtype)
    for group, scale_K in scales.items():
        assert scale_K.isfinite().all()
        assert (scale_K > 0).all()
        assert 0 < errors[group] < 0.01
    for norm in NORMS.values():
        assert (sample.layer[norm][[0, 3]] == 0).all()
    assert all(0.3 < scale_K[17] < 3 for scale_K in (scales["o"], scales["down"]))
    layer = dict(sample.layer)
    smooth_(layer, biased.architecture, scales)
    assert all(tensor.isfinite().all() for tensor in layer.values())


@pytest.mark.parametrize("recipe", ["smoothquant", "m2"])
@pytest.mark.parametrize("group", GROUPS)
def test_inputs_that_are_always_zero_need_no_smoothing(
    biased: Checkpoint, group: str, recipe: Recipe
) -> None:
    sample = make_sample(biased, spread=1.0)
    sample.fitted[group].zero_()
    sample.absmax[group].zero_()
    scales, errors = search_scales(sample, recipe, None, torch.float32)
    assert (scales[group] == 1).all()
    assert errors[group] == pytest.approx(0, abs=1e-9)
    assert all(scale_K.isfinite().all() for scale_K in scales.values())


def test_the_search_is_deterministic_and_changes_nothing(searched: Checkpoint) -> None:
    sample = make_sample(searched, outliers=30, spread=0.5)
    before = {name: tensor.clone() for name, tensor in sample.layer.items()}
    inputs = {group: x_TK.clone() for group, x_TK in sample.fitted.items()}
    once, errors = search_scales(sample, "m2", None, torch.bfloat16)
    torch.manual_seed(99)
    twice, same_errors = search_scales(sample, "m2", None, torch.bfloat16)
    assert errors == same_errors
    assert all(torch.equal(once[group], twice[group]) for group in GROUPS)
    assert all(torch.equal(sample.layer[name], before[name]) for name in before)
    assert all(torch.equal(sample.fitted[group], inputs[group]) for group in GROUPS)


# --- Refinement ---


def heavy_tailed(tokens: int = 300, count: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    size_K = (1.5 * torch.randn(count, generator=generator)).exp()
    x_TK = torch.randn(tokens, count, generator=generator) * size_K
    x_TK *= torch.randn(tokens, 1, generator=generator).exp()
    size_J1 = torch.randn(40, 1, generator=generator).exp()
    return x_TK, torch.randn(40, count, generator=generator) * size_J1


def expected_error(
    x_TK: torch.Tensor, weight_JK: torch.Tensor, scale_K: torch.Tensor
) -> torch.Tensor:
    """The two sums of quant/refine.py's introduction, relative to |y| ** 2 of independent inputs."""
    total = torch.zeros((), dtype=torch.float64)
    weight_JK, scale_K = weight_JK.double(), scale_K.double()
    for x_K in x_TK.double():
        of_x = (x_K / scale_K).abs().max() ** 2 * (scale_K**2 * (weight_JK**2).sum(0)).sum()
        of_w = ((weight_JK * scale_K).abs().amax(1) ** 2).sum() * ((x_K / scale_K) ** 2).sum()
        total = total + (of_x + of_w) / (x_K**2 * (weight_JK**2).sum(0)).sum()
    return total / len(x_TK)


def measured_error(x_TK: torch.Tensor, weight_JK: torch.Tensor, scale_K: torch.Tensor) -> float:
    wanted_TJ = x_TK.double() @ weight_JK.double().T
    got_TJ = naive_rows(x_TK / scale_K) @ naive_rows(weight_JK * scale_K).T
    return float(((got_TJ - wanted_TJ).square().sum(1) / wanted_TJ.square().sum(1)).mean())


@pytest.mark.parametrize("error_of", [expected_error, measured_error])
def test_refining_lowers_the_error(error_of: Callable[..., float]) -> None:
    x_TK, weight_JK = heavy_tailed()
    plain_K = torch.ones(x_TK.shape[1])
    balance_K = x_TK.abs().amax(0).sqrt() / weight_JK.abs().amax(0).sqrt()
    for start_K, factor in ((plain_K, 0.5), (balance_K, 0.9)):
        refined_K = refine_scales(x_TK, weight_JK, start_K)
        after, before = (error_of(x_TK, weight_JK, s) for s in (refined_K, start_K))
        assert after < factor * before
    # Also for tokens that were not seen.
    refined_K = refine_scales(x_TK[:200], weight_JK, plain_K)
    unseen = x_TK[200:]
    assert error_of(unseen, weight_JK, refined_K) < 0.5 * error_of(unseen, weight_JK, plain_K)


def test_the_gradient_is_that_of_the_expected_error() -> None:
    x_TK, weight_JK = (tensor.double() for tensor in heavy_tailed())
    scale_K = heavy_tailed()[0][0].abs().double().exp().requires_grad_()
    expected = expected_error(x_TK, weight_JK, scale_K)
    expected.log().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        column_power_K = weight_JK.square().sum(dim=0)
        power_TK = x_TK.square() / (x_TK.square() @ column_power_K)[:, None]
        widest = (weight_JK * scale_K).abs().max(dim=1).indices
        found_K = _gradient(
            power_TK,
            column_power_K,
            widest,
            weight_JK.gather(1, widest[:, None])[:, 0],
            scale_K.log(),
        )
    assert scale_K.grad is not None
    wanted_K = scale_K.grad * scale_K.detach()  # By log s.
    torch.testing.assert_close(found_K, wanted_K, rtol=1e-6, atol=1e-9)
    assert float(wanted_K.abs().max()) > 0.01


def test_refining_is_deterministic() -> None:
    x_TK, weight_JK = heavy_tailed()
    start_K = torch.ones(x_TK.shape[1])
    arguments = [tensor.clone() for tensor in (x_TK, weight_JK, start_K)]
    with torch.no_grad():  # As calibration calls it.
        once = refine_scales(x_TK, weight_JK, start_K)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    twice = refine_scales(x_TK, weight_JK, start_K)
    assert torch.equal(once, twice)
    assert torch.equal(torch.get_rng_state(), state)
    assert not once.requires_grad
    assert all(map(torch.equal, arguments, (x_TK, weight_JK, start_K)))


def test_a_uniform_factor_of_the_scales_stays() -> None:
    # Only ratios matter, so that the outcome is the same but for the factor.
    x_TK, weight_JK = heavy_tailed()
    once = refine_scales(x_TK, weight_JK, torch.ones(48))
    doubled = refine_scales(x_TK, weight_JK, torch.full((48,), 2.0))
    torch.testing.assert_close(doubled, 2 * once, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    "zero", ["channel", "token", "output", "weights of a channel", "all these"]
)
def test_refining_zeros_gives_finite_scales(zero: str) -> None:
    x_TK, weight_JK = heavy_tailed()
    everything = zero == "all these"
    if everything or zero == "channel":
        x_TK[:, 3] = 0
    if everything or zero == "token":
        x_TK[::2] = 0
    if everything or zero == "output":
        weight_JK[5] = 0
    if everything or zero == "weights of a channel":
        weight_JK[:, 7] = 0
    refined_K = refine_scales(x_TK, weight_JK, torch.ones(48))
    assert refined_K.isfinite().all()
    assert (refined_K > 0).all()
    assert not torch.equal(refined_K, torch.ones(48))
