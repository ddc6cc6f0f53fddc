"""The target model against transformers, family by family, and the checkpoints it refuses."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quant.architecture import read_architecture
from quant.checkpoint import open_checkpoint
from quant.errors import CheckpointError
from quant.hub import find_checkpoint
from tests.tiny import (
    convert_all,
    edit_config,
    load_model,
    make_checkpoint,
    make_prompts,
    num_threads,
    prefill,
    reference_logits,
    riffle,
    run_passes,
)
from workers.backend import StepBatch

TOLERANCE = 1e-4
LENGTHS = (41, 9, 1, 24)

LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "llama-all-biases-tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-narrow-heads": ("llama", {"head_dim": 6}),
    "llama-odd-sizes": (
        "llama",
        {
            "hidden_size": 40,
            "intermediate_size": 50,
            "head_dim": 10,
            "vocab_size": 157,
            "eos_token_id": 7,
        },
    ),
    "llama-sharded": ("llama", {"max_shard_size": "60KB"}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "mistral-window-of-one": ("mistral", {"sliding_window": 1}),
    "mistral-wide-heads": ("mistral", {"head_dim": 24, "sliding_window": 5}),
    "mistral-yarn": ("mistral", {"rope_parameters": YARN}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2-some-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen2-window-not-used": ("qwen2", {"use_sliding_window": False, "sliding_window": 8}),
    "qwen2-sharded": ("qwen2", {"max_shard_size": "60KB", "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-wide-heads-llama3": ("qwen3", {"head_dim": 32, "rope_parameters": LLAMA3}),
    "qwen3-some-windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    ),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with num_threads(1):
        yield


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = VARIANTS[request.param]
    return make_checkpoint(tmp_path_factory.mktemp("variant"), family, **overrides)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "llama", "llama", num_hidden_layers=1)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    largest = float(theirs.abs().max())
    assert 1 < largest < 30, "the checkpoint must give logits worth comparing"
    difference = float((ours - theirs).abs().max())
    assert difference < TOLERANCE, f"{difference:.2e}, {difference / largest:.2e} of the largest"


def test_logits_are_those_of_transformers(variant: Path) -> None:
    model = load_model(variant, precision="float32")
    prompts = make_prompts(LENGTHS, model.architecture.vocab_size)
    theirs = reference_logits(variant, prompts)

    for prompt, expected in zip(prompts, theirs, strict=True):
        assert_close(prefill(model, prompt), expected)
    # One token a pass: decoding over the cache.
    assert_close(run_passes(model, prompts[:1], [0] * LENGTHS[0], 1)[0], theirs[0])
    # All rows share passes that cut prompts anywhere and interleave their tokens.
    for seed, chunk in enumerate((7, 32)):
        mixed = run_passes(model, prompts, riffle(LENGTHS, seed), chunk)
        for ours, expected in zip(mixed, theirs, strict=True):
            assert_close(ours, expected)


def test_only_the_wanted_tokens_get_logits(llama: Path) -> None:
    model = load_model(llama, precision="float32")
    (prompt,) = make_prompts([12])
    (expected,) = reference_logits(llama, [prompt])
    wanted = torch.tensor([11, 2, 5])
    batch = StepBatch(
        torch.tensor(prompt), torch.zeros(12, dtype=torch.long), torch.arange(12), wanted
    )
    assert_close(model.forward(batch, model.new_cache(1, 12)), expected[wanted])


@pytest.mark.parametrize("precision", ["float32", "bf16", "w8a8"])
def test_a_pass_may_want_no_logits(llama: Path, precision: str) -> None:
    # A prompt longer than the pass's budget, alone: nothing is sampled until its last chunk.
    model = load_model(llama, precision=precision)
    cache = model.new_cache(1, 12)
    (prompt,) = make_prompts([12])
    whole = prefill(model, prompt)
    rows, nothing = torch.zeros(12, dtype=torch.long), torch.empty(0, dtype=torch.long)
    first = StepBatch(torch.tensor(prompt[:9]), rows[:9], torch.arange(9), nothing)
    last = StepBatch(torch.tensor(prompt[9:]), rows[9:], torch.arange(9, 12), torch.tensor([2]))
    assert model.forward(first, cache).shape == (0, 300)
    torch.testing.assert_close(model.forward(last, cache)[0], whole[-1], rtol=1e-5, atol=1e-5)


def test_a_cache_row_can_be_used_again(llama: Path) -> None:
    model = load_model(llama, precision="float32")
    prompts = make_prompts([20, 11])
    cache = model.new_cache(1, 20)
    for prompt, expected in zip(prompts, reference_logits(llama, prompts), strict=True):
        count = len(prompt)
        rows, all_tokens = torch.zeros(count, dtype=torch.long), torch.arange(count)
        batch = StepBatch(torch.tensor(prompt), rows, all_tokens, all_tokens)
        assert_close(model.forward(batch, cache), expected)


def test_legacy_rope_spelling_is_understood(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", rope_parameters=LLAMA3)
    modern = read_architecture(folder)
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    edit_config(folder, rope_parameters=None, rope_scaling=scaling, rope_theta=500.0)
    assert read_architecture(folder) == modern
    scaling["type"] = scaling.pop("rope_type")
    edit_config(folder, rope_scaling=scaling)
    assert read_architecture(folder) == modern


def test_inverse_frequencies_by_hand(tmp_path: Path) -> None:
    # theta ** (-2 i / D) with theta = 10000, D = 8; linear scaling divides by the factor.
    by_hand = pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-6)
    default = {"rope_type": "default", "rope_theta": 10000.0}
    plain = make_checkpoint(tmp_path / "a", "llama", head_dim=8, rope_parameters=default)
    assert read_architecture(plain).rope_inv_freq == by_hand
    scaled = make_checkpoint(
        tmp_path / "b", "llama", head_dim=8, rope_parameters=LINEAR | {"factor": 4.0}
    )
    assert [4 * value for value in read_architecture(scaled).rope_inv_freq] == by_hand


@pytest.mark.parametrize(
    ("family", "overrides", "windows"),
    [
        ("llama", {}, (0, 0, 0)),
        ("mistral", {"sliding_window": 8}, (8, 8, 8)),
        ("mistral", {}, (0, 0, 0)),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            (0, 8, 8),
        ),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8}, (0, 0, 0)),
    ],
)
def test_windows_of_the_layers(
    tmp_path: Path, family: str, overrides: dict[str, Any], windows: tuple[int, ...]
) -> None:
    assert read_architecture(make_checkpoint(tmp_path, family, **overrides)).windows == windows


def test_eos_ids_come_from_the_generation_config_first(llama: Path) -> None:
    (llama / "generation_config.json").unlink(missing_ok=True)
    assert read_architecture(llama).eos_token_ids == (256,)
    (llama / "generation_config.json").write_text('{"eos_token_id": [7, 256]}', encoding="utf-8")
    assert read_architecture(llama).eos_token_ids == (7, 256)


def test_a_tied_checkpoint_may_hold_the_tied_copy(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    (prompt,) = make_prompts([6])
    before = prefill(load_model(folder, precision="float32"), prompt)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(prefill(load_model(folder, precision="float32"), prompt), before)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("generation_config.json", "{"),
        ("model.safetensors.index.json", "{"),
        ("model.safetensors.index.json", "{}"),
    ],
)
def test_broken_companion_file_is_refused(llama: Path, name: str, text: str) -> None:
    (llama / name).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(llama)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"already quantized \(gptq\)"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "RoPE scaling 'dynamic' is not supported",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "factor": 2.0,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "original_max_position_embeddings": 128,
                    "rope_theta": 1e4,
                }
            },
            "RoPE scaling 'longrope' is not supported",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            },
            "partial rotary embeddings are not supported",
        ),
    ],
)
def test_config_that_cannot_run_is_refused(
    llama: Path, fields: dict[str, Any], reason: str
) -> None:
    edit_config(llama, **fields)
    with pytest.raises(CheckpointError, match=reason) as caught:
        open_checkpoint(llama)
    assert str(llama) in str(caught.value)


def test_unknown_layer_types_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen2")
    kinds = ["full_attention", "chunked_attention", "full_attention"]
    edit_config(folder, layer_types=kinds)
    with pytest.raises(CheckpointError, match=r"layer types .*chunked_attention"):
        read_architecture(folder)


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "no config.json"), ("{", "not valid JSON"), ("[]", "expected a JSON object")],
)
def test_broken_config_is_refused(llama: Path, text: str | None, reason: str) -> None:
    path = llama / "config.json"
    path.unlink()
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=reason):
        open_checkpoint(llama)


def test_pickle_only_checkpoint_is_refused(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor"):
        open_checkpoint(llama)
    torch.save(tensors, llama / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"only pickle files \(pytorch_model\.bin\)"):
        open_checkpoint(llama)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = make_checkpoint(tmp_path / "sharded", "llama", max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def test_missing_shard_is_refused(sharded: Path) -> None:
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=f"{gone.name} is missing"):
        open_checkpoint(sharded)


def test_file_that_the_index_does_not_name_is_not_read(sharded: Path) -> None:
    # Some publishers ship a second copy of the weights under their own names beside the shards.
    save_file({"tok_embeddings.weight": torch.ones(2, 2)}, sharded / "consolidated.safetensors")
    files = set(open_checkpoint(sharded).files.values())
    assert sharded / "consolidated.safetensors" not in files


@pytest.mark.parametrize("keep", [0, 4, 100, -10])
def test_truncated_file_is_refused(llama: Path, keep: int) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged"):
        open_checkpoint(llama)


def _rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path) | change
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, metadata={"format": "pt"})


def test_missing_tensor_is_refused(llama: Path) -> None:
    _rewrite(llama, {"model.layers.0.mlp.up_proj.weight": None})
    with pytest.raises(
        CheckpointError, match=r"tensors missing: 1, such as model\.layers\.0\.mlp\.up_proj\.weight"
    ):
        open_checkpoint(llama)


def test_missing_head_of_an_untied_checkpoint_is_refused(llama: Path) -> None:
    _rewrite(llama, {"lm_head.weight": None})
    with pytest.raises(CheckpointError, match=r"missing: 1, such as lm_head\.weight"):
        open_checkpoint(llama)


def test_unknown_tensor_is_refused(llama: Path) -> None:
    _rewrite(llama, {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)})
    with pytest.raises(CheckpointError, match=r"not understood, such as .*q_proj\.bias"):
        open_checkpoint(llama)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (
            "model.embed_tokens.weight",
            (200, 64),
        ),  # Ids from 200 on would fail in the middle of a job.
        ("lm_head.weight", (301, 64)),
        ("model.layers.0.self_attn.k_proj.weight", (16, 64)),
        ("model.layers.0.input_layernorm.weight", (1,)),
    ],
)
def test_tensor_of_another_shape_is_refused(llama: Path, name: str, shape: tuple[int, ...]) -> None:
    _rewrite(llama, {name: torch.ones(shape)})
    with pytest.raises(CheckpointError, match=name):
        convert_all(llama)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.mlp.down_proj.weight",
    ],
)
def test_weights_that_are_not_finite_are_refused(llama: Path, name: str, value: float) -> None:
    tensor = load_file(llama / "model.safetensors")[name].clone()
    tensor.view(-1)[3] = value
    _rewrite(llama, {name: tensor})
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinity"):
        convert_all(llama)


def test_weights_that_are_no_floats_are_refused(llama: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    _rewrite(llama, {name: torch.ones(64, 64, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match=rf"{name} has dtype torch\.int8, which is not"):
        convert_all(llama)


def test_names_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file"):
        find_checkpoint(str(file))
    for name in (str(tmp_path / "nowhere"), "./nowhere", "a/b/c"):
        with pytest.raises(CheckpointError, match="no such folder"):
            find_checkpoint(name)
    assert find_checkpoint(str(tmp_path)) == tmp_path


def test_the_index_is_read_with_the_shards(sharded: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(sharded, tmp_path / "copy")
    index = json.loads((copy / "model.safetensors.index.json").read_text(encoding="utf-8"))
    checkpoint = open_checkpoint(copy)
    assert {name: path.name for name, path in checkpoint.files.items()} == index["weight_map"]
