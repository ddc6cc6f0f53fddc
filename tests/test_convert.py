"""From a checkpoint to pieces, and from pieces to a model whose answer no batch can change."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from quant.architecture import Architecture
from quant.checkpoint import open_checkpoint
from quant.config import QuantConfig
from quant.convert import Piece, num_pieces, to_torch
from quant.int8 import pack, unpack
from quant.prepare import recipe_digest, weights_digest
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
from workers.backend import KVCache, StepBatch
from workers.torch_backend import TorchBackend

LENGTHS = (37, 8, 1, 22)
FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
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
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with num_threads(1):
        yield


@pytest.fixture(scope="module", params=MODELS, ids=str)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = MODELS[request.param]
    # Narrower than elsewhere: rounding errors grow with the scores, and are measured here.
    return make_checkpoint(tmp_path_factory.mktemp("model"), family, std=0.15, **overrides)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    overrides = {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2}
    return make_checkpoint(tmp_path / "llama", "llama", **overrides)


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return make_checkpoint(
        tmp_path / "tied", "qwen3", tie_word_embeddings=True, num_hidden_layers=1
    )


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_dequantizes(piece: Piece, name: str, expected_NK: torch.Tensor) -> None:
    """Codes and scales stand for the matrix, within half a step and with the full range used."""
    weight, scale_N = piece[f"{name}.weight"], piece[f"{name}.scale"]
    assert (weight.dtype, scale_N.dtype) == (np.int8, np.float32)
    codes_NK = weight
    if name != "embeddings":  # A linear: its weights are packed, and nothing else is with them.
        codes = unpack(torch.from_numpy(weight), *expected_NK.shape)
        assert torch.equal(pack(codes), torch.from_numpy(weight))
        codes_NK = codes.numpy()
    assert codes_NK.shape == expected_NK.shape
    assert (np.abs(codes_NK.astype(int)).max(axis=1) == 127).all()
    wide_NK = expected_NK.double().numpy()
    np.testing.assert_allclose(scale_N, np.abs(wide_NK).max(axis=1) / 127, rtol=1e-6)
    error_NK = np.abs(codes_NK * scale_N[:, None].astype(float) - wide_NK)
    assert (error_NK <= scale_N[:, None] * 0.50001).all()


# --- Pieces ---


@pytest.mark.parametrize("precision", ["w8a8", "bf16", "float32", "float64"])
def test_the_same_checkpoint_gives_the_same_bytes(llama: Path, precision: str) -> None:
    once, twice = (convert_all(llama, precision=precision) for _ in range(2))
    assert len(once) == num_pieces(open_checkpoint(llama)) == 3
    for first, second in zip(once, twice, strict=True):
        assert list(first) == list(second)
        for name, array in first.items():
            assert array.flags.c_contiguous
            assert array.dtype == second[name].dtype
            assert array.tobytes() == second[name].tobytes()


def test_fused_layers(llama: Path) -> None:
    tensors = tensors_of(llama)
    pieces = convert_all(llama)
    for index, piece in enumerate(pieces[1:]):
        layer = f"model.layers.{index}"
        for fused, parts in FUSED.items():
            expected_NK = torch.cat([tensors[f"{layer}.{part}.weight"] for part in parts])
            assert_dequantizes(piece, fused, expected_NK)
            bias_N = torch.cat([tensors[f"{layer}.{part}.bias"] for part in parts])
            assert torch.equal(to_torch(piece[f"{fused}.bias"]), bias_N)
        for ours, theirs in (
            ("input_norm", "input_layernorm"),
            ("post_norm", "post_attention_layernorm"),
        ):
            assert torch.equal(to_torch(piece[ours]), tensors[f"{layer}.{theirs}.weight"])
    # 4 query heads and 2 + 2 key/value heads of 16; gate and up of 96; in cells of 16 x 4.
    shapes = {name: pieces[1][f"{name}.weight"].shape for name in FUSED}
    assert shapes == {
        "qkv": (128 // 16, 64 // 4, 16, 4),
        "o": (64 // 16, 64 // 4, 16, 4),
        "gate_up": (192 // 16, 64 // 4, 16, 4),
        "down": (64 // 16, 96 // 4, 16, 4),
    }


def test_head_norms_and_missing_biases(tied: Path) -> None:
    tensors = tensors_of(tied)
    piece = convert_all(tied)[1]
    for name in ("q_norm", "k_norm"):
        expected = tensors[f"model.layers.0.self_attn.{name}.weight"]
        assert torch.equal(to_torch(piece[name]), expected)
    assert not [name for name in piece if name.endswith(".bias")]


@pytest.mark.parametrize(
    ("precision", "dtype", "gain_dtype"),
    [
        ("bf16", torch.bfloat16, torch.float32),
        ("float32", torch.float32, torch.float32),
        ("float64", torch.float64, torch.float64),
    ],
)
def test_float_precisions_keep_the_weights(
    llama: Path, precision: str, dtype: torch.dtype, gain_dtype: torch.dtype
) -> None:
    tensors = tensors_of(llama)
    outer, layer, _ = convert_all(llama, precision=precision)
    parts = [tensors[f"model.layers.0.{part}.weight"] for part in FUSED["qkv"]]
    expected = {
        "embeddings.weight": tensors["model.embed_tokens.weight"].to(dtype),
        "head.weight": tensors["lm_head.weight"].to(dtype),
        "final_norm": tensors["model.norm.weight"].to(gain_dtype),
    }
    assert outer.keys() == expected.keys()
    for name, tensor in expected.items():
        assert to_torch(outer[name]).dtype == tensor.dtype
        assert torch.equal(to_torch(outer[name]), tensor)
    assert torch.equal(to_torch(layer["qkv.weight"]), torch.cat(parts).to(dtype))
    assert not [name for name in layer if name.endswith(".scale")]


@pytest.mark.parametrize("precision", ["bf16", "float32", "float64"])
def test_a_tied_head_shares_the_embeddings(tied: Path, precision: str) -> None:
    assert convert_all(tied, precision=precision)[0].keys() == {"embeddings.weight", "final_norm"}


@pytest.mark.parametrize("checkpoint", ["tied", "llama"])
@pytest.mark.parametrize("head", ["int8", "bf16"])
@pytest.mark.parametrize("embeddings", ["int8", "bf16"])
def test_outer_layers_under_w8a8(
    checkpoint: str, head: str, embeddings: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(checkpoint)
    tensors = tensors_of(folder)
    embedding_VC = tensors["model.embed_tokens.weight"]
    head_VC = tensors.get("lm_head.weight", embedding_VC)
    assert ("lm_head.weight" in tensors) == (checkpoint == "llama")
    outer = convert_all(folder, head=head, embeddings=embeddings)[0]

    # A quantized head leaves the embeddings it is tied to alone, and the other way round.
    for name, kind, expected in (
        ("embeddings", embeddings, embedding_VC),
        ("head", head, head_VC),
    ):
        if kind == "int8":
            assert_dequantizes(outer, name, expected)
        elif f"{name}.weight" in outer:
            assert f"{name}.scale" not in outer
            assert torch.equal(to_torch(outer[f"{name}.weight"]), expected.bfloat16())
        else:
            assert (name, checkpoint, embeddings) == ("head", "tied", "bf16")
    model = load_model(folder, head=head, embeddings=embeddings)
    (prompt,) = make_prompts([9])
    (expected_logits,) = reference_logits(folder, [prompt])
    error = (prefill(model, prompt) - expected_logits).norm() / expected_logits.norm()
    assert error < 0.15


def test_unknown_recipes_are_refused() -> None:
    for field in ({"precision": "int4"}, {"head": "int4"}, {"group_size": 128}):
        with pytest.raises(ValidationError):
            QuantConfig(**field)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.uint16])
def test_read_only_arrays_become_tensors_without_a_warning(dtype: type) -> None:
    array = np.arange(6, dtype=dtype).reshape(2, 3)
    array.flags.writeable = False
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # torch warns of read-only memory once per process otherwise.
    try:
        tensor = to_torch(array)
    finally:
        torch.set_warn_always(before)
    assert tensor.data_ptr() == array.ctypes.data
    if dtype is np.uint16:
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor.view(torch.int16), torch.arange(6).reshape(2, 3).short())
    else:
        assert tensor.tolist() == array.tolist()


def test_a_model_runs_on_read_only_pieces(llama: Path) -> None:
    (prompt,) = make_prompts([9])
    expected = prefill(load_model(llama), prompt)
    pieces = convert_all(llama)
    for piece in pieces:
        for array in piece.values():
            array.flags.writeable = False
    model = load_model(llama)
    read_only = type(model)(model.architecture, pieces, model.backend, max_len=256)
    assert torch.equal(prefill(read_only, prompt), expected)


# --- The name of converted weights ---


def digest(folder: Path, **recipe: Any) -> str:
    config = QuantConfig(**recipe)
    return weights_digest(config, recipe_digest(open_checkpoint(folder), config, [[1, 2]]))


def test_digest_does_not_depend_on_the_folder(llama: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(llama, tmp_path / "another" / "name")
    assert digest(copy) == digest(llama)
    (copy / "README.md").write_text("not a weight", encoding="utf-8")
    assert digest(copy) == digest(llama)
    assert len(digest(llama)) == 64


def test_digest_changes_with_the_recipe(llama: Path) -> None:
    recipes = [
        {},
        {"precision": "bf16"},
        {"precision": "float32"},
        {"head": "bf16"},
        {"embeddings": "int8"},
        {"recipe": "rtn"},
        {"alpha": 0.5},
        {"target_agreement": 0.9},
        {"max_float_bytes": 1000},
    ]
    assert len({digest(llama, **recipe) for recipe in recipes}) == len(recipes)


def test_digest_changes_with_the_content(llama: Path) -> None:
    digests = {digest(llama)}
    path = llama / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # One bit of one weight.
    path.write_bytes(content)
    digests.add(digest(llama))
    edit_config(llama, rms_norm_eps=1e-3)
    digests.add(digest(llama))
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}), encoding="utf-8")
    digests.add(digest(llama))
    assert len(digests) == 4


def test_digest_changes_with_any_shard(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", max_shard_size="60KB")
    digests = {digest(folder)}
    shards = sorted(folder.glob("*.safetensors"))
    for path in shards:
        content = bytearray(path.read_bytes())
        content[-2] ^= 1
        path.write_bytes(content)
        digests.add(digest(folder))
    assert len(digests) == len(shards) + 1


# --- The whole model ---


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours - reference).norm() / reference.norm())


class RoundedCacheBackend(TorchBackend):
    """Plain float32 torch with a bfloat16 cache."""

    def new_cache(self, architecture: Architecture, num_rows: int, max_len: int) -> KVCache:
        return TorchBackend(torch.bfloat16).new_cache(architecture, num_rows, max_len)


@pytest.mark.parametrize("recipe", [{}, {"head": "bf16", "embeddings": "int8"}], ids=str)
def test_cpu_kernels_agree_with_plain_torch(folder: Path, recipe: dict[str, str]) -> None:
    cpu = load_model(folder, **recipe)
    (prompt,) = make_prompts([40], cpu.architecture.vocab_size)
    ours = prefill(cpu, prompt)
    # What is left: an activation at the edge of a code, or of a bfloat16, that falls the other way.
    same_cache = load_model(folder, RoundedCacheBackend(torch.float32), **recipe)
    assert relative_error(ours, prefill(same_cache, prompt)) < 2e-2
    # And against a float32 cache: its rounding to bfloat16, 2 ** -9 of a value, three layers deep.
    float_cache = load_model(folder, TorchBackend(torch.float32), **recipe)
    assert relative_error(ours, prefill(float_cache, prompt)) < 0.06


@pytest.mark.parametrize(("precision", "limit"), [("bf16", 0.03), ("w8a8", 0.1)])
def test_distance_to_the_checkpoint(folder: Path, precision: str, limit: float) -> None:
    model = load_model(folder, precision=precision)
    (prompt,) = make_prompts([40], model.architecture.vocab_size)
    (expected,) = reference_logits(folder, [prompt])
    assert relative_error(prefill(model, prompt), expected) < limit


@pytest.mark.parametrize("precision", ["w8a8", "bf16"])
def test_every_way_to_feed_a_prompt_gives_the_same_bits(folder: Path, precision: str) -> None:
    model = load_model(folder, precision=precision)
    prompts = make_prompts(LENGTHS, model.architecture.vocab_size)
    alone = [prefill(model, prompt) for prompt in prompts]
    assert all(logits.isfinite().all() for logits in alone)
    # One token a pass, alone; then all rows at once, their tokens interleaved, cut anywhere.
    assert torch.equal(run_passes(model, prompts[:1], [0] * LENGTHS[0], 1)[0], alone[0])
    for seed, chunk in enumerate((3, 10, 68)):
        together = run_passes(model, prompts, riffle(LENGTHS, seed), chunk)
        for ours, expected in zip(together, alone, strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("precision", ["w8a8", "bf16"])
def test_overwritten_positions_leave_no_trace(folder: Path, precision: str) -> None:
    # A rejected draft costs a smaller length only: its keys and values stay until overwritten.
    model = load_model(folder, precision=precision)
    vocab_size = model.architecture.vocab_size
    (prompt,) = make_prompts([20], vocab_size)
    drafted = [(token + 1) % vocab_size for token in prompt]
    expected = prefill(model, prompt)
    cache = model.new_cache(1, 20)

    def feed(tokens: list[int], start: int) -> torch.Tensor:
        count = len(tokens)
        positions = torch.arange(start, start + count)
        rows = torch.zeros(count, dtype=torch.long)
        batch = StepBatch(torch.tensor(tokens), rows, positions, torch.arange(count))
        return model.forward(batch, cache)

    got = []
    for at in range(0, 20, 4):
        feed(drafted[at:], at)
        got.append(feed(prompt[at : at + 4], at))
    assert torch.equal(torch.cat(got), expected)


@pytest.mark.parametrize("precision", ["w8a8", "bf16"])
def test_a_broken_row_breaks_no_other(llama: Path, precision: str) -> None:
    prompts = make_prompts([12, 12], vocab_size=299)
    model = load_model(llama, precision=precision)
    prompts[1][5] = 299  # Its embedding is made NaN below; the other row never uses it.
    expected = prefill(model, prompts[0])
    pieces = convert_all(llama, precision=precision)
    pieces[0]["embeddings.weight"][299] = 0x7FC0
    broken = type(model)(model.architecture, pieces, model.backend, max_len=256)
    healthy, ill = run_passes(broken, prompts, riffle([12, 12], 3), 5)
    assert torch.equal(healthy, expected)
    assert ill[:5].isfinite().all()
    assert ill[5:].isnan().all()
