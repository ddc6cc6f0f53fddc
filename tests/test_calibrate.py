"""The layer-by-layer decoder, what calibration sees through it, and what stays in floating point."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quant.calibrate import (
    ActivationStats,
    GroupError,
    Treatment,
    embed,
    observe,
    texts_to_check,
    treat,
)
from quant.checkpoint import Checkpoint, open_checkpoint
from quant.config import QuantConfig
from quant.decoder import apply_float, forward_layer, read_layer
from quant.fallback import choose_float_groups
from quant.fidelity import Fidelity
from quant.prepare import calibrate
from quant.quantize import ROUND_TO_NEAREST
from quant.simulate import Head, run_texts
from tests.tiny import (
    FAMILIES,
    edit_config,
    load_model,
    make_checkpoint,
    make_prompts,
    num_threads,
    prefill,
    reference_logits,
)
from workers.backend import Backend
from workers.cpu import CpuBackend
from workers.torch_backend import TorchBackend

GROUPS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
ODD = {
    "hidden_size": 40,
    "intermediate_size": 50,
    "head_dim": 10,
    "vocab_size": 157,
    "eos_token_id": 7,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama-biases": ("llama", BIASES),
    "llama-odd-sizes-tied": ("llama", BIASES | ODD | {"tie_word_embeddings": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "mistral-window": ("mistral", {"sliding_window": 6}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-some-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3-wide-heads-bias": ("qwen3", {"head_dim": 32, "attention_bias": True}),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 10000.0,
            }
        },
    ),
}
LENGTHS = (23, 1, 9, 30)
RTN = QuantConfig(recipe="rtn")
M2 = QuantConfig(recipe="m2")
Keys = frozenset[tuple[int, str]]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with num_threads(1):
        yield


@pytest.fixture(scope="module", params=MODELS, ids=str)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = MODELS[request.param]
    return make_checkpoint(tmp_path_factory.mktemp("model"), family, std=0.2, **overrides)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return make_checkpoint(folder, "llama", std=0.15, num_hidden_layers=2, **BIASES)


def to_bfloat16(folder: Path) -> Path:
    """Round a checkpoint, so that embeddings and head are in the models what they are in the file."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    edit_config(folder, dtype="bfloat16")
    return folder


def load_reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def make_texts(checkpoint: Checkpoint, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    return make_prompts(lengths, checkpoint.architecture.vocab_size)


# --- The decoder ---


def hidden_states(checkpoint: Checkpoint, texts: Sequence[list[int]]) -> list[torch.Tensor]:
    """The residual stream of all texts before the first layer and behind every one."""
    a = checkpoint.architecture
    states = [embed(checkpoint, texts)]
    lengths = [len(text) for text in texts]
    for index in range(a.num_layers):
        layer = read_layer(checkpoint, index, torch.float32)
        states.append(forward_layer(layer, a, index, states[-1], lengths, apply_float(layer, a)))
    return states


def test_the_decoder_is_that_of_transformers(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    texts = make_texts(checkpoint)
    states = hidden_states(checkpoint, texts)
    # transformers norms the last one.
    states[-1] = run_texts(checkpoint, QuantConfig(precision="float32"), ROUND_TO_NEAREST, texts)
    logits_TV = Head(checkpoint, QuantConfig(precision="float32"))(states[-1])
    assert len(states) == checkpoint.architecture.num_layers + 1

    model, start = load_reference(folder), 0
    for text in texts:
        rows = slice(start, start + len(text))
        start = rows.stop
        with torch.inference_mode():
            theirs = model(torch.tensor([text]), use_cache=False, output_hidden_states=True)
        assert 1 < float(theirs.logits.abs().max()) < 30
        torch.testing.assert_close(logits_TV[rows], theirs.logits[0], rtol=0, atol=1e-4)
        for ours, expected in zip(states, theirs.hidden_states, strict=True):
            torch.testing.assert_close(ours[rows], expected[0], rtol=0, atol=1e-4)
    assert start == len(logits_TV)


def test_a_text_does_not_see_its_neighbours(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    texts = make_texts(checkpoint)
    together = hidden_states(checkpoint, texts)[-1].split(LENGTHS)
    for text, ours in zip(texts, together, strict=True):
        alone = hidden_states(checkpoint, [text])[-1]
        torch.testing.assert_close(ours, alone, rtol=0, atol=1e-4)  # Sums in another order.
    # Other tokens next to it: not one bit changes.
    vocab_size = checkpoint.architecture.vocab_size
    others = [[(token + 1) % vocab_size for token in text] for text in texts]
    for kept in range(len(texts)):
        mixed = [text if i == kept else others[i] for i, text in enumerate(texts)]
        parts = hidden_states(checkpoint, mixed)[-1].split(LENGTHS)
        same = [torch.equal(part, ours) for part, ours in zip(parts, together, strict=True)]
        assert same == [i == kept for i in range(len(texts))]


# --- Statistics ---


def naive_inputs(folder: Path, texts: Sequence[list[int]]) -> dict[tuple[int, str], torch.Tensor]:
    """The inputs [T, K] of every group, through transformers text by text."""
    model = load_reference(folder)
    seen: dict[tuple[int, str], list[torch.Tensor]] = {}
    for index, layer in enumerate(model.model.layers):
        for group, linears in GROUPS.items():
            for linear in linears[:1]:
                parts = seen.setdefault((index, group), [])

                def hook(_: Any, args: Any, parts: list[torch.Tensor] = parts) -> None:
                    parts.append(args[0][0])

                layer.get_submodule(linear).register_forward_pre_hook(hook)
    with torch.inference_mode():
        for text in texts:
            model(torch.tensor([text]), use_cache=False)
    return {key: torch.cat(parts) for key, parts in seen.items()}


def assert_same_stats(ours: ActivationStats, theirs: ActivationStats) -> None:
    assert ours.absmax.keys() == theirs.absmax.keys()
    for key, absmax_K in ours.absmax.items():
        assert torch.equal(absmax_K, theirs.absmax[key]), key


def test_the_maxima_are_those_that_transformers_sees(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    texts = make_texts(checkpoint)
    stats = observe(checkpoint, texts)
    inputs = naive_inputs(folder, texts)
    assert stats.absmax.keys() == inputs.keys()
    assert len(inputs) == 4 * checkpoint.architecture.num_layers
    for key, x_TK in inputs.items():
        expected = x_TK.abs().amax(dim=0)
        torch.testing.assert_close(stats.absmax[key], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_tokens", [1, 16, 40, 2048])
def test_maxima_do_not_depend_on_batches(
    llama: Path, batch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(llama)
    texts = make_texts(checkpoint)
    expected = naive_inputs(llama, texts)
    monkeypatch.setattr("quant.calibrate._BATCH_TOKENS", batch_tokens)
    for key, absmax_K in observe(checkpoint, texts).absmax.items():
        reference = expected[key].abs().amax(dim=0)
        torch.testing.assert_close(absmax_K, reference, rtol=1e-4, atol=1e-5)


def test_shards_add_up_to_all_bit_for_bit(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    texts = make_texts(checkpoint, (9, 1, 17, 5, 12))
    everything = observe(checkpoint, texts)
    for cut in (1, 3, 4):
        shards = [observe(checkpoint, part) for part in (texts[:cut], texts[cut:])]
        assert_same_stats(shards[0] + shards[1], everything)
        # Neither says it all, so that the sum is no copy of one.
        for shard in shards:
            assert any(
                not torch.equal(absmax_K, everything.absmax[key])
                for key, absmax_K in shard.absmax.items()
            )


def test_statistics_add_in_any_order_and_grouping(llama: Path) -> None:
    checkpoint = open_checkpoint(llama)
    shards = [observe(checkpoint, [text]) for text in make_texts(checkpoint, (9, 4, 17))]
    first, second, third = shards
    before = {key: absmax_K.clone() for key, absmax_K in first.absmax.items()}
    for x, y, z in itertools.permutations(shards):
        assert_same_stats(x + y + z, first + second + third)
        assert_same_stats(x + (y + z), first + second + third)
    for key, absmax_K in (first + second + third).absmax.items():
        each = [shard.absmax[key].tolist() for shard in shards]
        assert absmax_K.tolist() == [max(values) for values in zip(*each, strict=True)]
    assert_same_stats(first + first, first)
    assert_same_stats(ActivationStats() + first, first)
    assert_same_stats(first + ActivationStats(), first)
    assert_same_stats(first, ActivationStats(before))  # Unchanged itself.


def test_statistics_of_different_layers_are_kept_apart() -> None:
    left = ActivationStats({(0, "qkv"): torch.tensor([1.0, 5.0]), (0, "o"): torch.tensor([2.0])})
    right = ActivationStats({(0, "qkv"): torch.tensor([3.0, 4.0]), (1, "o"): torch.tensor([7.0])})
    for merged in (left + right, right + left):
        assert {key: value.tolist() for key, value in merged.absmax.items()} == {
            (0, "qkv"): [3.0, 5.0],
            (0, "o"): [2.0],
            (1, "o"): [7.0],
        }


# --- Treatment ---


def assert_same_treatment(ours: Treatment, theirs: Treatment) -> None:
    assert ours.errors == theirs.errors
    assert ours.float_groups == theirs.float_groups
    for mine, other in zip(ours.scales, theirs.scales, strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[group], other[group]) for group in mine)


def test_treating_is_deterministic(llama: Path) -> None:
    checkpoint = open_checkpoint(llama)
    texts = make_texts(checkpoint)
    once = treat(checkpoint, texts, M2)
    torch.manual_seed(99)
    assert_same_treatment(treat(checkpoint, texts, M2), once)
    assert [set(scales) for scales in once.scales] == [set(GROUPS)] * 2
    assert not once.float_groups
    assert all(s.isfinite().all() and (s > 0).all() for of in once.scales for s in of.values())
    with pytest.raises(AssertionError):
        assert_same_treatment(treat(checkpoint, make_texts(checkpoint, (8, 7)), M2), once)


def smoothquant_scales(absmax_K: torch.Tensor, weight_JK: torch.Tensor) -> torch.Tensor:
    """The formula for alpha = 0.5, of geometric mean 1."""
    scale_K = (absmax_K / weight_JK.abs().amax(dim=0)).sqrt()
    return scale_K / scale_K.log().mean().exp()


def test_scales_come_from_these_texts_and_from_what_others_saw(llama: Path) -> None:
    checkpoint = open_checkpoint(llama)
    here, elsewhere = make_texts(checkpoint, (9, 12)), make_texts(checkpoint, (30, 5, 8))
    config = QuantConfig(recipe="smoothquant", alpha=0.5)
    alone = treat(checkpoint, here, config)
    seen = observe(checkpoint, elsewhere)
    joined = treat(checkpoint, here, config, seen=seen)
    mine, theirs = naive_inputs(llama, here), naive_inputs(llama, elsewhere)
    tensors = load_file(llama / "model.safetensors")
    for layer, group in itertools.product(range(2), ("qkv", "gate_up", "down")):
        weight_JK = torch.cat(
            [tensors[f"model.layers.{layer}.{linear}.weight"] for linear in GROUPS[group]]
        )
        maxima = [x[layer, group].abs().amax(dim=0) for x in (mine, theirs)]
        wanted = smoothquant_scales(maxima[0], weight_JK)
        torch.testing.assert_close(alone.scales[layer][group], wanted, rtol=1e-3, atol=0)
        wanted = smoothquant_scales(torch.maximum(*maxima), weight_JK)
        torch.testing.assert_close(joined.scales[layer][group], wanted, rtol=1e-3, atol=0)
        assert float((joined.scales[layer][group] / alone.scales[layer][group]).std()) > 0.01
    # Those who know nothing new change nothing.
    again = treat(checkpoint, here, config, seen=observe(checkpoint, here[:1]))
    assert_same_treatment(again, alone)


def test_rounding_to_nearest_is_treated_with_errors_alone(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    texts = make_texts(checkpoint)
    treatment = treat(checkpoint, texts, RTN)
    assert treatment.scales == ({},) * checkpoint.architecture.num_layers
    tensors = load_file(folder / "model.safetensors")
    inputs = naive_inputs(folder, texts)
    states = [[state[0] for state in of] for of in reference_states(folder, texts)]
    keys = [(e.layer, e.group) for e in treatment.errors]
    assert keys == list(itertools.product(range(checkpoint.architecture.num_layers), GROUPS))
    for error in treatment.errors:
        prefix = f"model.layers.{error.layer}."
        weights = [tensors[f"{prefix}{linear}.weight"] for linear in GROUPS[error.group]]
        assert error.num_weights == sum(weight.numel() for weight in weights)
        assert 0 < error.output < 0.5
        # How much of the stream behind the layer the attention, or the MLP, has brought.
        last = "o" if error.group in ("qkv", "o") else "down"
        linear = prefix + GROUPS[last][0]
        added_TC = inputs[error.layer, last] @ tensors[f"{linear}.weight"].T
        added_TC = added_TC + tensors.get(f"{linear}.bias", torch.zeros(1))
        stream_TC = torch.cat([of[error.layer] for of in states])
        share = (added_TC.square().sum(1) / stream_TC.square().sum(1)).mean()
        assert error.stream == pytest.approx(error.output * float(share), rel=1e-3)


def reference_states(folder: Path, texts: Sequence[list[int]]) -> list[list[torch.Tensor]]:
    """transformers' residual stream behind every layer, of every text; the last before its norm."""
    model = load_reference(folder)
    states: list[list[torch.Tensor]] = []
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda _, __, out: states[-1].append(out[0] if isinstance(out, tuple) else out)
        )
    with torch.inference_mode():
        for text in texts:
            states.append([])
            model(torch.tensor([text]), use_cache=False)
    return states


def test_errors_of_output_layers_are_measured_on_the_texts(llama: Path) -> None:
    checkpoint = open_checkpoint(llama)
    texts = make_texts(checkpoint)
    checked = [texts[i] for i in texts_to_check(texts)]
    inputs, tensors = naive_inputs(llama, checked), load_file(llama / "model.safetensors")
    for error in treat(checkpoint, texts, RTN).errors:
        if error.group not in ("o", "down"):
            continue
        linear = f"model.layers.{error.layer}.{GROUPS[error.group][0]}"
        x_TK, weight_JK = inputs[error.layer, error.group], tensors[f"{linear}.weight"]
        bias_J = tensors[f"{linear}.bias"]
        got_TJ = round_to_codes(x_TK) @ round_to_codes(weight_JK).T + bias_J
        wanted_TJ = x_TK @ weight_JK.T + bias_J
        shares_T = (got_TJ - wanted_TJ).square().sum(1) / wanted_TJ.square().sum(1)
        assert error.output == pytest.approx(float(shares_T.mean()), rel=0.02)


def test_texts_that_scales_are_chosen_by() -> None:
    # A quarter of the texts, evenly spread, of not much more than 768 tokens; one at the least.
    assert texts_to_check([[1] * 10] * 8) == [0, 4]
    assert texts_to_check([[1] * 100] * 128) == [i * 16 for i in range(8)]
    assert texts_to_check([[1] * 5000] * 9) == [0]
    assert texts_to_check([[1] * 5000]) == [0]
    assert len(texts_to_check([[1] * 64] * 128)) == 12


def test_texts_that_scales_are_chosen_by_are_not_fitted_to(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(llama)
    lengths = (9, 4, 7, 5, 6, 3, 8, 2)
    samples = []

    def searched(sample: Any, *_: Any) -> Any:
        samples.append(sample)
        return {}, dict.fromkeys(sample.fitted, 0.0)

    monkeypatch.setattr("quant.calibrate.search_scales", searched)
    for texts, checked, rest in (
        (make_texts(checkpoint, lengths), (0, 4), (1, 2, 3, 5, 6, 7)),
        (make_texts(checkpoint, lengths[:1]), (0,), (0,)),  # Of one text, both are done.
    ):
        inputs = naive_inputs(llama, texts)
        starts = [0, *itertools.accumulate(map(len, texts))]
        rows = {i: slice(starts[i], starts[i + 1]) for i in range(len(texts))}
        samples.clear()
        treat(checkpoint, texts, M2)
        assert [sample.index for sample in samples] == [0, 1]
        for sample, group in itertools.product(samples, GROUPS):
            x_TK = inputs[sample.index, group]
            for got, numbers in ((sample.checked, checked), (sample.fitted, rest)):
                wanted = torch.cat([x_TK[rows[i]] for i in numbers])
                torch.testing.assert_close(got[group], wanted, rtol=1e-3, atol=1e-4)
            assert sample.lengths == [len(texts[i]) for i in checked]


# --- The simulation ---


def round_to_codes(x_MK: torch.Tensor, max_code: int = 127) -> torch.Tensor:
    """Every row in `max_code` steps to either side."""
    step_M1 = x_MK.abs().amax(dim=-1, keepdim=True) / max_code
    step_M1[step_M1 == 0] = 1
    return (x_MK / step_M1).round() * step_M1


def naive_quantized(
    folder: Path,
    texts: Sequence[list[int]],
    float_groups: Keys = frozenset(),
    *,
    fine_down: bool = False,
) -> list[torch.Tensor]:
    """Logits of transformers' model with every linear and its input rounded."""
    model = load_reference(folder)
    head_code = min(127 * 256 + 127, (2**31 - 1) // (128 * model.config.hidden_size))
    down_code = min(127 * 256 + 127, (2**31 - 1) // (128 * model.config.intermediate_size))

    def quantize(module: Any, max_code: int) -> None:
        module.weight = torch.nn.Parameter(round_to_codes(module.weight.data))
        module.register_forward_pre_hook(lambda _, args: round_to_codes(args[0], max_code))

    with torch.inference_mode():
        for index, layer in enumerate(model.model.layers):
            for group, linears in GROUPS.items():
                for linear in linears:
                    module = layer.get_submodule(linear)
                    if (index, group) in float_groups:
                        module.weight.copy_(module.weight.bfloat16().float())
                    else:
                        quantize(module, down_code if fine_down and group == "down" else 127)
        quantize(model.lm_head, head_code)
        model.model.embed_tokens.register_forward_hook(lambda *args: args[2].bfloat16().float())
        return [model(torch.tensor([text]), use_cache=False).logits[0] for text in texts]


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def simulated(
    folder: Path,
    config: QuantConfig,
    treatment: Treatment,
    texts: Sequence[list[int]],
) -> list[torch.Tensor]:
    checkpoint = open_checkpoint(folder)
    logits_TV = Head(checkpoint, config)(run_texts(checkpoint, config, treatment, texts))
    return list(logits_TV.split([len(text) for text in texts]))


SIMULATED = {
    "llama": BIASES,
    "mistral": {"sliding_window": 8},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize(("head", "down"), [("int8", "int8"), ("bf16", "int8"), ("int8", "int16")])
@pytest.mark.parametrize("family", SIMULATED)
def test_the_simulation_computes_what_the_models_do(
    tmp_path: Path, family: str, head: Any, down: Any
) -> None:
    folder = to_bfloat16(make_checkpoint(tmp_path, family, std=0.15, **SIMULATED[family]))
    texts = make_texts(open_checkpoint(folder), (21, 1, 12))
    config = QuantConfig(recipe="rtn", head=head, down_activations=down)
    ours = simulated(folder, config, ROUND_TO_NEAREST, texts)
    originals = reference_logits(folder, texts)
    # The CPU's cache rounds keys and values to bfloat16, 2 ** -9 of a value, three layers deep.
    backends: tuple[tuple[Backend, float], ...] = (
        (TorchBackend(torch.float32), 4e-3),
        (CpuBackend(), 0.06),
    )
    for backend, limit in backends:
        model = load_model(folder, backend, recipe="rtn", head=head, down_activations=down)
        for text, got, original in zip(texts, ours, originals, strict=True):
            theirs = prefill(model, text)
            assert relative_error(got, theirs) < limit
            assert relative_error(original, theirs) > 4e-3  # Quantization costs more than that.


@pytest.mark.parametrize(
    "float_groups",
    [(), ((0, "qkv"),), ((0, "o"), (2, "down")), tuple(itertools.product(range(3), GROUPS))],
    ids=len,
)
def test_the_simulation_is_transformers_with_rounded_linears(
    folder: Path, float_groups: tuple[tuple[int, str], ...]
) -> None:
    texts = make_texts(open_checkpoint(folder), (14, 5))
    kept = frozenset(float_groups)
    ours = simulated(folder, RTN, Treatment(float_groups=kept), texts)
    plain = simulated(folder, RTN, ROUND_TO_NEAREST, texts)
    for got, expected, other in zip(ours, naive_quantized(folder, texts, kept), plain, strict=True):
        assert relative_error(got, expected) < 1e-2
        if kept:
            assert relative_error(other, expected) > 1e-2


def test_down_proj_with_finer_activations(folder: Path) -> None:
    texts = make_texts(open_checkpoint(folder), (14, 5))
    fine = QuantConfig(recipe="rtn", down_activations="int16")
    ours = simulated(folder, fine, ROUND_TO_NEAREST, texts)
    wanted = naive_quantized(folder, texts, fine_down=True)
    plain = simulated(folder, RTN, ROUND_TO_NEAREST, texts)
    for got, expected, other in zip(ours, wanted, plain, strict=True):
        assert relative_error(got, expected) < 0.3 * relative_error(other, expected)
    # And the search counts its error with the finer codes.
    errors = {}
    for config in (RTN, fine):
        treatment = treat(open_checkpoint(folder), make_texts(open_checkpoint(folder)), config)
        errors[config.down_activations] = {(e.layer, e.group): e.output for e in treatment.errors}
    for (layer, group), error in errors["int16"].items():
        coarse = errors["int8"][layer, group]
        assert error < 0.8 * coarse if group == "down" else error == coarse


def test_float_linears_alone_cost_little(llama: Path) -> None:
    texts = make_texts(open_checkpoint(llama), (20,))
    everything = frozenset(itertools.product(range(2), GROUPS))
    (original,) = reference_logits(llama, texts)
    (rounded,) = simulated(llama, RTN, ROUND_TO_NEAREST, texts)
    (kept,) = simulated(llama, RTN, Treatment(float_groups=everything), texts)
    assert relative_error(kept, original) < 0.5 * relative_error(rounded, original)


# --- What stays in floating point ---

# Bytes of the groups of `llama` in bfloat16: twice 128 x 64, 64 x 64, 192 x 64 and 64 x 96.
BYTES = {"qkv": 16384, "o": 8192, "gate_up": 24576, "down": 12288}


def invented(streams: dict[tuple[int, str], float]) -> Treatment:
    """A treatment with these errors in the stream; `output` says the opposite."""
    errors = [
        GroupError(layer, group, BYTES[group] // 2, 1 / stream, stream)
        for (layer, group), stream in streams.items()
    ]
    return Treatment(errors=tuple(errors))


# Errors per byte, worst first: (1, o) 40, (0, down) 30, (0, gate_up) 20, (1, qkv) 10, (0, o) 5, ...
# By the error itself the order would be (0, gate_up), (0, down), (1, o), (1, qkv), ...
STREAMS = {
    (0, "qkv"): 1 * 16384.0,
    (0, "o"): 5 * 8192.0,
    (0, "gate_up"): 20 * 24576.0,
    (0, "down"): 30 * 12288.0,
    (1, "qkv"): 10 * 16384.0,
    (1, "o"): 40 * 8192.0,
    (1, "gate_up"): 2 * 24576.0,
    (1, "down"): 3 * 12288.0,
}
ORDER = [
    (1, "o"),
    (0, "down"),
    (0, "gate_up"),
    (1, "qkv"),
    (0, "o"),
    (1, "down"),
    (1, "gate_up"),
    (0, "qkv"),
]


@pytest.mark.parametrize(
    ("max_bytes", "expected"),
    [
        (0, []),
        (8191, []),
        (8192, ORDER[:1]),
        (20480, ORDER[:2]),
        (45056, ORDER[:3]),
        # A group that does not fit is passed over for what does, behind it: with 12287 bytes left ...
        (20479, [(1, "o"), (0, "o")]),
        # ... with 24575, which leaves 8191 after qkv, and with 16383 behind the first three.
        (45055, [(1, "o"), (0, "down"), (1, "qkv")]),
        (61439, [*ORDER[:3], (0, "o")]),
        (10**9, ORDER),
    ],
)
def test_float_bytes_go_to_the_worst_per_byte(
    llama: Path, max_bytes: int, expected: list[tuple[int, str]]
) -> None:
    checkpoint = open_checkpoint(llama)
    texts = make_texts(checkpoint, (6, 8))
    config = QuantConfig(recipe="rtn", max_float_bytes=max_bytes)
    treatment = invented(STREAMS)
    chosen, _ = choose_float_groups(checkpoint, config, treatment, texts)
    assert chosen.float_groups == frozenset(expected)
    assert sum(BYTES[group] for _, group in chosen.float_groups) <= max_bytes
    assert (chosen.scales, chosen.errors) == (treatment.scales, treatment.errors)


def test_nothing_asked_leaves_nothing_in_float(llama: Path) -> None:
    checkpoint = open_checkpoint(llama)
    texts = make_texts(checkpoint)
    for recipe in ("rtn", "m2"):
        config = QuantConfig(recipe=recipe)
        treatment = treat(checkpoint, texts, config)
        chosen, fidelity = choose_float_groups(checkpoint, config, treatment, texts)
        assert chosen == replace(treatment, float_groups=frozenset())
        assert len(fidelity.agrees_T) > 0


def naive_agreements(folder: Path, texts: Sequence[list[int]]) -> list[float]:
    """The share of equal first choices with the first n of ORDER in floating point, n = 0, 1, ..."""

    def choices(of_texts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([logits[:-1].argmax(dim=1) for logits in of_texts])

    original = choices(reference_logits(folder, texts))
    return [
        float(
            (choices(naive_quantized(folder, texts, frozenset(ORDER[:n]))) == original)
            .float()
            .mean()
        )
        for n in range(len(ORDER) + 1)
    ]


@pytest.fixture(scope="module")
def coarse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Outlier channels in every norm, so that rounding changes many a first choice."""
    folder = make_checkpoint(
        tmp_path_factory.mktemp("coarse"), "llama", std=0.15, num_hidden_layers=2
    )
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[:3] *= 30
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


LONG_CHECKS = (60, 5, 5, 5, 70, 5, 5, 5, 50, 5, 5, 5)  # The long ones are measured on.


def test_as_few_groups_as_reach_the_target(coarse: Path) -> None:
    checkpoint = open_checkpoint(coarse)
    texts = make_texts(checkpoint, LONG_CHECKS)
    assert texts_to_check(texts) == [0, 4, 8]
    treatment = invented(STREAMS)
    agreements = naive_agreements(coarse, [texts[i] for i in (0, 4, 8)])
    assert agreements[0] < 0.9
    assert agreements[-1] > agreements[0] + 0.05
    counts = set()
    for target in sorted({round(a, 3) for a in agreements if a > 0} | {0.01}):
        target -= 0.002
        config = QuantConfig(recipe="rtn", target_agreement=max(target, 0.001))
        chosen, fidelity = choose_float_groups(checkpoint, config, treatment, texts)
        count = len(chosen.float_groups)
        counts.add(count)
        assert chosen.float_groups == frozenset(ORDER[:count])
        assert fidelity.agreement == pytest.approx(agreements[count], abs=0.012)  # Two choices.
        assert fidelity.agreement >= target
        # One less would not do.
        assert count == 0 or agreements[count - 1] < target + 0.012
        assert len(fidelity.agrees_T) == 60 + 70 + 50 - 3
    assert 0 in counts
    assert len(counts) > 3


@pytest.mark.parametrize("needed", range(len(ORDER) + 1))
def test_bisection_finds_the_smallest_number(
    llama: Path, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(_: Any, __: Any, treatment: Treatment, *___: Any) -> Fidelity:
        agrees_T = torch.tensor([True, len(treatment.float_groups) >= needed])
        return Fidelity(agrees_T, *[torch.zeros(2)] * 4)

    monkeypatch.setattr("quant.fallback.measure", measured)
    checkpoint = open_checkpoint(llama)
    config = QuantConfig(recipe="rtn", target_agreement=1.0)  # Reached, not exceeded.
    texts = make_texts(checkpoint, (4,))
    chosen, fidelity = choose_float_groups(checkpoint, config, invented(STREAMS), texts)
    assert chosen.float_groups == frozenset(ORDER[:needed])
    assert fidelity.agreement == 1


def test_a_target_out_of_reach_takes_all_that_is_allowed(
    coarse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(coarse)
    texts = make_texts(checkpoint, (40, 30))
    treatment = invented(STREAMS)
    worse = Fidelity(*[torch.zeros(5)] * 5)
    monkeypatch.setattr("quant.fallback.measure", lambda *_: worse)
    for max_bytes, expected in ((None, ORDER), (20480, ORDER[:2]), (0, [])):
        config = QuantConfig(recipe="rtn", target_agreement=1.0, max_float_bytes=max_bytes)
        chosen, fidelity = choose_float_groups(checkpoint, config, treatment, texts)
        assert chosen.float_groups == frozenset(expected)
        assert fidelity is worse


def test_bytes_bound_what_a_target_takes(coarse: Path) -> None:
    checkpoint = open_checkpoint(coarse)
    texts = make_texts(checkpoint, LONG_CHECKS)
    treatment = invented(STREAMS)
    easy = QuantConfig(recipe="rtn", target_agreement=0.01, max_float_bytes=20480)
    assert not choose_float_groups(checkpoint, easy, treatment, texts)[0].float_groups
    hard = QuantConfig(recipe="rtn", target_agreement=1.0, max_float_bytes=20480)
    chosen, fidelity = choose_float_groups(checkpoint, hard, treatment, texts)
    assert fidelity.agreement < 1
    assert chosen.float_groups == frozenset(ORDER[:2])


def test_measured_errors_decide_which_groups_stay(coarse: Path) -> None:
    checkpoint = open_checkpoint(coarse)
    texts = make_texts(checkpoint)
    treatment = treat(checkpoint, texts, RTN)
    worst = max(treatment.errors, key=lambda e: e.stream / e.num_weights)
    config = QuantConfig(recipe="rtn", max_float_bytes=2 * worst.num_weights)
    chosen, _ = choose_float_groups(checkpoint, config, treatment, texts)
    assert chosen.float_groups == {(worst.layer, worst.group)}


def test_texts_of_one_token_have_nothing_to_compare(llama: Path) -> None:
    checkpoint = open_checkpoint(llama)
    texts = make_texts(checkpoint, (1, 5, 1, 7))
    config = QuantConfig(max_float_bytes=0)
    _, fidelity = calibrate(checkpoint, config, texts)
    assert fidelity is not None
    assert len(fidelity.agrees_T) == 4


@pytest.mark.parametrize(
    "name",
    ["self_attn.o_proj", "self_attn.v_proj", "mlp.down_proj", "mlp.up_proj", "input_layernorm"],
)
def test_a_layer_that_does_nothing_is_no_trouble(tmp_path: Path, name: str) -> None:
    """As blocks that were added to a model begin, and pruned ones end."""
    folder = make_checkpoint(tmp_path, "qwen2", num_hidden_layers=2)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.1.{name}.weight"].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(folder)
    texts = make_texts(checkpoint, (20, 15))
    treatment = treat(checkpoint, texts, QuantConfig())
    for scales in treatment.scales:
        assert all(scale_K.isfinite().all() for scale_K in scales.values())
    assert all(error.output >= 0 for error in treatment.errors)
    assert run_texts(checkpoint, QuantConfig(), treatment, texts).isfinite().all()
