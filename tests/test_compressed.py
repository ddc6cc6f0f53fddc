"""Quantized checkpoints: what is written is compressed-tensors' format, and what others wrote is read."""

import errno
import json
import resource
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quant import compressed
from quant.calibrate import Treatment
from quant.checkpoint import open_checkpoint
from quant.compressed import float_linears, read_report, write_quantized
from quant.config import QuantConfig
from quant.convert import Piece, to_torch
from quant.errors import CheckpointError
from tests.tiny import (
    convert_all,
    edit_config,
    load_model,
    make_checkpoint,
    make_prompts,
    num_threads,
    prefill,
    reference_logits,
    tiny_tokenizer,
)
from workers.torch_backend import TorchBackend

RTN = QuantConfig(recipe="rtn")
GROUPS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
LINEARS = [linear for linears in GROUPS.values() for linear in linears]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"attention_bias": True}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "odd-sizes": (
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
FLOAT_GROUPS = frozenset({(0, "qkv"), (1, "down")})
FLOAT_LINEARS = [f"model.layers.0.{x}" for x in GROUPS["qkv"]] + ["model.layers.1.mlp.down_proj"]

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with num_threads(1):
        yield


@pytest.fixture(scope="module", params=MODELS, ids=str)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = MODELS[request.param]
    folder = tmp_path_factory.mktemp("source")
    return make_checkpoint(folder, family, std=0.15, num_hidden_layers=2, **overrides)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    overrides: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2}
    return make_checkpoint(tmp_path / "llama", "llama", std=0.15, **overrides)


def tensors_of(folder: Path) -> Tensors:
    """Every tensor of all files, each of which must be in one file only."""
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        loaded = load_file(path)
        assert not loaded.keys() & tensors.keys()
        tensors |= loaded
    return tensors


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of model.safetensors, or leave out those that are None; "__" is a dot."""
    path = folder / "model.safetensors"
    named = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    tensors = load_file(path) | named
    kept = {name: t.contiguous() for name, t in tensors.items() if t is not None}
    save_file(kept, path, metadata={"format": "pt"})


def cast(folder: Path, dtype: torch.dtype) -> None:
    """Give every tensor of model.safetensors another float dtype."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def write(
    folder: Path, target: Path, treatment: Treatment | None = None, **options: Any
) -> dict[str, Any]:
    """Write the treated checkpoint; returns the report that went into it."""
    report = {"digest": "abc", "float_linears": []}
    checkpoint = open_checkpoint(folder)
    write_quantized(checkpoint, RTN, treatment or Treatment(), target, report, **options)
    return report


def random_treatment(
    raw: dict[str, Any], float_groups: frozenset[tuple[int, str]] = FLOAT_GROUPS
) -> Treatment:
    """Scales between 1/2 and 2; those of o_proj are the same for query heads of one value head."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.exp2(torch.rand(shape, generator=generator) * 2 - 1)

    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    scales = []
    for _ in range(raw["num_hidden_layers"]):
        of_values = draw(kv_heads, 1, raw["head_dim"])
        scales.append(
            {
                "qkv": draw(raw["hidden_size"]),
                "o": of_values.expand(-1, heads // kv_heads, -1).flatten(),
                "gate_up": draw(raw["hidden_size"]),
                "down": draw(raw["intermediate_size"]),
            }
        )
    return Treatment(tuple(scales), (), float_groups)


def smooth_by_hand(tensors: Tensors, raw: dict[str, Any], treatment: Treatment) -> Tensors:
    """The tensors in float64 with a linear's inputs divided by the scales, its weights multiplied."""
    out = {name: tensor.double() for name, tensor in tensors.items()}
    kv_heads, head_dim = raw["num_key_value_heads"], raw["head_dim"]
    for index, scales in enumerate(treatment.scales):
        layer = f"model.layers.{index}"
        wide = {group: scale.double() for group, scale in scales.items()}
        for group, linears in GROUPS.items():
            for linear in linears:
                out[f"{layer}.{linear}.weight"] *= wide[group]
        out[f"{layer}.input_layernorm.weight"] /= wide["qkv"]
        out[f"{layer}.post_attention_layernorm.weight"] /= wide["gate_up"]
        of_values = wide["o"].reshape(kv_heads, -1, head_dim)[:, 0].flatten()
        for linear, scale in (("self_attn.v_proj", of_values), ("mlp.up_proj", wide["down"])):
            out[f"{layer}.{linear}.weight"] /= scale[:, None]
            if f"{layer}.{linear}.bias" in out:
                out[f"{layer}.{linear}.bias"] /= scale
    return out


def assert_same_pieces(ours: Sequence[Piece], expected: Sequence[Piece]) -> None:
    assert [list(piece) for piece in ours] == [list(piece) for piece in expected]
    for piece, other in zip(ours, expected, strict=True):
        for name, array in piece.items():
            assert (array.dtype, array.shape) == (other[name].dtype, other[name].shape)
            assert array.tobytes() == other[name].tobytes(), name


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours - reference).norm() / reference.norm())


# --- What is written ---


def test_tensors_of_a_written_checkpoint(source: Path, tmp_path: Path) -> None:
    raw, target = config_of(source), tmp_path / "made"
    treatment = random_treatment(raw)
    write(source, target, treatment)
    original = tensors_of(source)
    smoothed = smooth_by_hand(original, raw, treatment)
    made = tensors_of(target)

    linears = [f"model.layers.{i}.{linear}" for i in range(2) for linear in LINEARS]
    int8 = [linear for linear in linears if linear not in FLOAT_LINEARS]
    assert len(int8) == 14 - 4
    assert made.keys() == original.keys() | {f"{linear}.weight_scale" for linear in int8}
    for linear in int8:
        wanted_NK = smoothed.pop(f"{linear}.weight")
        codes_NK, scale_N1 = made[f"{linear}.weight"], made[f"{linear}.weight_scale"]
        assert (codes_NK.dtype, codes_NK.shape) == (torch.int8, wanted_NK.shape)
        assert (scale_N1.dtype, scale_N1.shape) == (torch.float32, (len(wanted_NK), 1))
        assert codes_NK.int().abs().amax(dim=1).eq(127).all()
        largest_N1 = wanted_NK.abs().amax(dim=1, keepdim=True)
        torch.testing.assert_close(scale_N1.double(), largest_N1 / 127, rtol=1e-6, atol=0)
        error_NK = (codes_NK.double() * scale_N1.double() - wanted_NK).abs()
        assert (error_NK <= 0.5001 * scale_N1).all()
    for linear in FLOAT_LINEARS:
        weight = made[f"{linear}.weight"]
        assert weight.dtype == torch.bfloat16
        wanted = smoothed.pop(f"{linear}.weight")
        torch.testing.assert_close(weight.double(), wanted, rtol=2**-8, atol=0)
    assert len(smoothed) > 4
    for name, wanted in smoothed.items():
        assert made[name].dtype == torch.float32
        torch.testing.assert_close(made[name].double(), wanted, rtol=1e-6, atol=0)
        if "layernorm" not in name and not name.endswith(("v_proj.bias", "up_proj.bias")):
            assert torch.equal(made[name], original[name])


def test_config_of_a_written_checkpoint(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "made"
    report = write(source, target, random_treatment(config_of(source)))
    made = config_of(target)
    quantization = made.pop("quantization_config")
    assert made == config_of(source)
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["format"] == "int-quantized"
    assert sorted(quantization["ignore"]) == sorted(["lm_head", *FLOAT_LINEARS])
    assert len(quantization["config_groups"]) == 1
    assert read_report(target) == report
    assert json.loads((target / "quasar.json").read_text(encoding="utf-8")) == report
    with safe_open(target / "model.safetensors", framework="pt") as handle:
        assert handle.metadata() == {"format": "pt"}  # transformers refuses files without it.


def test_float_linears_are_named_in_order(source: Path) -> None:
    treatment = Treatment(float_groups=FLOAT_GROUPS)
    assert float_linears(open_checkpoint(source), treatment) == FLOAT_LINEARS
    assert float_linears(open_checkpoint(source), Treatment()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_stays_in_float_keeps_its_dtype(
    llama: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    cast(llama, dtype)
    write(llama, tmp_path / "made", Treatment(float_groups=FLOAT_GROUPS))
    original, made = tensors_of(llama), tensors_of(tmp_path / "made")
    for name, tensor in original.items():
        linear = name.removesuffix(".weight")
        if made[name].dtype == torch.int8:
            assert made[f"{linear}.weight_scale"].dtype == torch.float32
        elif linear in FLOAT_LINEARS:
            assert torch.equal(made[name], tensor.bfloat16())
        else:
            assert made[name].dtype == dtype
            assert torch.equal(made[name], tensor)
    kinds = [tensor.dtype for tensor in made.values()]
    assert kinds.count(torch.int8) == 14 - 4


def test_a_tied_copy_of_the_head_is_left_out(tmp_path: Path) -> None:
    overrides: dict[str, Any] = {"tie_word_embeddings": True, "num_hidden_layers": 1}
    folder = make_checkpoint(tmp_path / "tied", "llama", **overrides)
    change_tensors(folder, lm_head__weight=torch.zeros(300, 64))
    write(folder, tmp_path / "made")
    assert "lm_head.weight" not in tensors_of(tmp_path / "made")
    assert open_checkpoint(tmp_path / "made").architecture.tied_head


def test_settings_are_copied_and_weights_are_not(llama: Path, tmp_path: Path) -> None:
    tiny_tokenizer(llama)
    kept = {
        "generation_config.json": '{"eos_token_id": [1, 2]}',
        "chat_template.jinja": "{{ messages }}",
        "special_tokens_map.json": "{}",
        "tokenizer.model": "pieces",
        "merges.txt": "a b",
        "quasar.json": '{"from": "elsewhere"}',
    }
    left = {
        "pytorch_model.bin.index.json": "{}",
        "pytorch_model.bin": "pickle",
        "consolidated.00.pth": "pickle",
        "optimizer.pt": "pickle",
        "model.gguf": "weights",
        "model.onnx": "weights",
        "modeling_custom.py": "code",
        "README.md": "words",
    }
    for name, text in (kept | left).items():
        (llama / name).write_text(text, encoding="utf-8")
    (llama / "original").mkdir()
    (llama / "original" / "params.json").write_text("{}", encoding="utf-8")
    report = write(llama, tmp_path / "made")
    names = {path.name for path in (tmp_path / "made").iterdir()}
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    assert names == {"config.json", "model.safetensors", *kept, *tokenizer}
    for name in {*kept, *tokenizer} - {"quasar.json"}:
        assert (tmp_path / "made" / name).read_bytes() == (llama / name).read_bytes()
    assert read_report(tmp_path / "made") == report
    assert open_checkpoint(tmp_path / "made").architecture.eos_token_ids == (1, 2)


@pytest.mark.parametrize("tied", [False, True])
def test_shards_and_their_index(tmp_path: Path, tied: bool) -> None:
    folder = make_checkpoint(
        tmp_path / "m", "qwen2", max_shard_size="60KB", tie_word_embeddings=tied
    )
    assert len(list(folder.glob("*.safetensors"))) > 2  # Of the source: none of them is copied.
    sharded, whole = tmp_path / "sharded", tmp_path / "whole"
    # Embeddings and head take 76800 bytes each, a layer about 32000 in int8.
    write(folder, sharded, max_shard_bytes=70_000)
    write(folder, whole)
    assert [path.name for path in whole.glob("*.safetensors*")] == ["model.safetensors"]
    index = json.loads((sharded / "model.safetensors.index.json").read_text(encoding="utf-8"))
    count = 3 if tied else 4
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    assert sorted(path.name for path in sharded.glob("*.safetensors")) == names
    made, expected = tensors_of(sharded), tensors_of(whole)
    assert made.keys() == expected.keys() == index["weight_map"].keys()
    for name, tensor in expected.items():
        assert torch.equal(made[name], tensor)
        assert name in load_file(sharded / index["weight_map"][name])
    num_bytes = {name: tensor.numel() * tensor.element_size() for name, tensor in made.items()}
    assert index["metadata"]["total_size"] == sum(num_bytes.values())
    for path in names:
        inside = [name for name, file in index["weight_map"].items() if file == path]
        is_alone = inside in (["model.embed_tokens.weight"], ["lm_head.weight"])
        assert is_alone or sum(num_bytes[name] for name in inside) <= 70_000
    assert_same_pieces(convert_all(sharded), convert_all(whole))
    assert_same_pieces(convert_all(sharded), convert_all(folder))


def test_the_same_bytes_when_made_twice(llama: Path, tmp_path: Path) -> None:
    tiny_tokenizer(llama)
    treatment = random_treatment(config_of(llama))
    for name in ("once", "twice"):
        write(llama, tmp_path / name, treatment, max_shard_bytes=60_000)
    once, twice = (sorted((tmp_path / name).iterdir()) for name in ("once", "twice"))
    assert [path.name for path in once] == [path.name for path in twice]
    assert len(once) > 6
    for first, second in zip(once, twice, strict=True):
        assert first.read_bytes() == second.read_bytes()


# --- Whole, or not at all ---

BAD = {
    "model.layers.0.self_attn.q_proj.weight": float("nan"),
    "model.layers.1.mlp.down_proj.weight": float("-inf"),
    "model.layers.1.mlp.up_proj.bias": float("nan"),
    "model.layers.1.post_attention_layernorm.weight": float("inf"),
    "model.embed_tokens.weight": float("nan"),
    "model.norm.weight": float("nan"),
    "lm_head.weight": float("inf"),
}


def assert_nothing_is_left(folder: Path, *others: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(others)


@pytest.mark.parametrize("name", BAD)
def test_nan_and_infinity_leave_nothing_behind(llama: Path, tmp_path: Path, name: str) -> None:
    tensor = tensors_of(llama)[name]
    tensor.view(-1)[-1] = BAD[name]
    change_tensors(llama, **{name: tensor})
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinity"):
        write(llama, tmp_path / "made", max_shard_bytes=1)
    assert_nothing_is_left(tmp_path, "llama")


def test_a_source_cut_short_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", "llama", max_shard_size="60KB")
    checkpoint = open_checkpoint(folder)
    last = checkpoint.files["model.layers.2.mlp.down_proj.weight"]
    assert last != checkpoint.files["model.layers.0.mlp.down_proj.weight"]
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=last.name):
        write_quantized(checkpoint, RTN, Treatment(), tmp_path / "made", {}, max_shard_bytes=1)
    assert_nothing_is_left(tmp_path, "m")
    with pytest.raises(CheckpointError, match=last.name):
        open_checkpoint(folder)


def test_an_error_while_writing_leaves_nothing_behind(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def save_two(tensors: Tensors, path: Path, metadata: dict[str, str]) -> None:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path, metadata)
        written.append(path)

    monkeypatch.setattr(compressed, "save_file", save_two)
    (tmp_path / "made").mkdir()
    with pytest.raises(OSError, match="No space left"):
        write(llama, tmp_path / "made", max_shard_bytes=1)
    assert len(written) == 2
    assert_nothing_is_left(tmp_path, "llama", "made")
    assert_nothing_is_left(tmp_path / "made")


def test_a_file_too_large_for_the_disk_leaves_nothing_behind(llama: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(llama)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises((OSError, SafetensorError), match="too large"):
            write_quantized(checkpoint, RTN, Treatment(), tmp_path / "made", {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_nothing_is_left(tmp_path, "llama")


def test_a_folder_with_something_in_it_is_left_as_it_is(llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "made"
    target.mkdir()
    (target / "config.json").write_text("mine", encoding="utf-8")
    with pytest.raises(OSError, match="not empty"):
        write(llama, target)
    assert_nothing_is_left(tmp_path, "llama", "made")
    assert_nothing_is_left(target, "config.json")
    assert (target / "config.json").read_text(encoding="utf-8") == "mine"


def test_an_empty_folder_is_filled_and_parents_are_made(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(llama, tmp_path / "empty")
    write(llama, tmp_path / "a" / "b" / "made")
    assert_nothing_is_left(tmp_path / "a" / "b", "made")
    for folder in (tmp_path / "empty", tmp_path / "a" / "b" / "made"):
        assert len(open_checkpoint(folder).quantized) == 14


def test_reports(llama: Path) -> None:
    assert read_report(llama) is None
    (llama / "quasar.json").write_text('{"digest": ', encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"quasar\.json: not valid JSON"):
        read_report(llama)


# --- Reading back ---


@pytest.mark.parametrize("outer", [{}, {"head": "bf16", "embeddings": "int8"}], ids=str)
def test_what_was_written_converts_to_the_same_bits(
    source: Path, tmp_path: Path, outer: dict[str, str]
) -> None:
    write(source, tmp_path / "made")
    checkpoint = open_checkpoint(tmp_path / "made")
    linears = {f"model.layers.{i}.{linear}" for i in range(2) for linear in LINEARS}
    assert checkpoint.quantized == linears
    assert open_checkpoint(source).quantized is None
    assert_same_pieces(
        convert_all(tmp_path / "made", **outer), convert_all(source, recipe="rtn", **outer)
    )


def test_float_groups_convert_to_bfloat16(source: Path, tmp_path: Path) -> None:
    write(source, tmp_path / "made", Treatment(float_groups=FLOAT_GROUPS))
    checkpoint = open_checkpoint(tmp_path / "made")
    assert not checkpoint.quantized & set(FLOAT_LINEARS)
    assert len(checkpoint.quantized) == 14 - 4
    tensors = tensors_of(source)
    pieces, plain = convert_all(tmp_path / "made"), convert_all(source)
    for index, group in sorted(FLOAT_GROUPS):
        piece = pieces[index + 1]
        names = [f"model.layers.{index}.{linear}.weight" for linear in GROUPS[group]]
        weight = torch.cat([tensors[name] for name in names]).bfloat16()
        assert torch.equal(to_torch(piece.pop(f"{group}.weight")), weight)
        assert f"{group}.scale" not in piece
        del plain[index + 1][f"{group}.weight"], plain[index + 1][f"{group}.scale"]
    assert_same_pieces(pieces, plain)


@pytest.mark.parametrize(("num_float", "limit"), [(7, 0.035), (2, 0.1)])
def test_a_smoothed_checkpoint_answers_as_the_original(
    source: Path, tmp_path: Path, num_float: int, limit: float
) -> None:
    most = frozenset((index, group) for index in range(2) for group in GROUPS) - {(1, "o")}
    groups = most if num_float == len(most) else FLOAT_GROUPS
    write(source, tmp_path / "made", random_treatment(config_of(source), groups))
    model = load_model(tmp_path / "made")
    (prompt,) = make_prompts([30], model.architecture.vocab_size)
    (expected,) = reference_logits(source, [prompt])
    assert relative_error(prefill(model, prompt), expected) < limit


@pytest.mark.parametrize("precision", ["bf16", "float32", "float64"])
def test_int8_weights_cannot_run_in_floating_point(
    llama: Path, tmp_path: Path, precision: str
) -> None:
    write(llama, tmp_path / "made")
    with pytest.raises(CheckpointError, match=f"made: holds int8 weights .* in {precision}"):
        convert_all(tmp_path / "made", precision=precision)


# --- What others wrote ---

MLP_1 = ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"]


def write_foreign(source: Path, folder: Path, ignore: list[str], kept: list[str]) -> Tensors:
    """A checkpoint as other tools write it: scales of max / 127.5 in bfloat16, codes down to -128.

    Args:
        source: a checkpoint of two layers in float32.
        folder: to write to.
        ignore: of the quantization_config.
        kept: the linears that are left in bfloat16 on account of it.

    Returns:
        The float32 tensors that the written ones stand for, by the source's names.
    """
    shutil.copytree(source, folder)
    original = tensors_of(source)
    tensors = {name: tensor.bfloat16() for name, tensor in original.items()}
    meant = {name: tensor.float() for name, tensor in tensors.items()}
    linears = [f"model.layers.{i}.{linear}" for i in range(2) for linear in LINEARS]
    for linear in [*linears, "lm_head"]:
        if linear in kept or f"{linear}.weight" not in tensors:
            continue
        weight_NK = original[f"{linear}.weight"]
        scale_N1 = (weight_NK.abs().amax(dim=1, keepdim=True) / 127.5).bfloat16()
        codes_NK = (weight_NK / scale_N1.float()).round().clamp(-128, 127)
        assert codes_NK.min() == -128
        tensors[f"{linear}.weight"] = codes_NK.to(torch.int8)
        tensors[f"{linear}.weight_scale"] = scale_N1
        meant[f"{linear}.weight"] = codes_NK * scale_N1.float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    arguments = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": arguments | {"strategy": "channel", "dynamic": False},
        "input_activations": arguments | {"strategy": "token", "dynamic": True},
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }
    edit_config(folder, quantization_config=quantization)
    return meant


def logits_by_hand(
    source: Path, meant: Tensors, prompt: list[int], int8: Sequence[str], bf16: Sequence[str]
) -> torch.Tensor:
    """transformers' logits with these weights; the inputs of some linears take 255 values.

    Args:
        source: a checkpoint of the same shape.
        meant: the weights.
        prompt: token ids.
        int8: the linears whose inputs are rounded, token by token.
        bf16: the linears that are computed in bfloat16.
    """
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.load_state_dict(meant, strict=not model.config.tie_word_embeddings)

    def round_inputs(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        scale = inputs[0].abs().amax(dim=-1, keepdim=True) / 127
        return (inputs[0] / scale).round() * scale

    def in_bfloat16(
        linear: torch.nn.Linear, inputs: tuple[torch.Tensor, ...], _: torch.Tensor
    ) -> torch.Tensor:
        product = F.linear(inputs[0].bfloat16(), linear.weight.bfloat16()).float()
        return product if linear.bias is None else product + linear.bias

    for name in int8:
        model.get_submodule(name).register_forward_pre_hook(round_inputs)
    for name in bf16:
        model.get_submodule(name).register_forward_hook(in_bfloat16)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt]), use_cache=False).logits[0]
    return logits


FOREIGN: dict[str, tuple[list[str], list[str]]] = {
    "everything": ([], []),  # The head, too.
    "lm_head": (["lm_head"], ["lm_head"]),
    "expressions": (
        [r"re:.*layers\.1\.mlp\.(gate|up)_proj$", "re:lm_head"],
        [*MLP_1, "lm_head"],
    ),
    "names": (
        [*MLP_1, "model.layers.0.self_attn.o_proj"],
        [*MLP_1, "model.layers.0.self_attn.o_proj"],
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_foreign_checkpoints_answer_as_what_they_stand_for(
    source: Path, tmp_path: Path, case: str
) -> None:
    ignore, kept = FOREIGN[case]
    meant = write_foreign(source, tmp_path / "foreign", ignore, kept)
    head = "bf16" if "lm_head" in kept else "int8"
    exact = load_model(tmp_path / "foreign", TorchBackend(torch.float32), head=head)
    (prompt,) = make_prompts([30], exact.architecture.vocab_size)
    linears = [f"model.layers.{i}.{linear}" for i in range(2) for linear in LINEARS]
    int8 = [linear for linear in linears if linear not in kept]
    # An int8 head's inputs have 16 bits, which is as good as float here.
    expected = logits_by_hand(source, meant, prompt, int8, kept)
    # What is left are inputs at the edge of a code that fall the other way.
    assert relative_error(prefill(exact, prompt), expected) < 0.012
    plain = logits_by_hand(source, meant, prompt, [], [])
    assert relative_error(expected, plain) > 0.015  # So that the rounding of inputs is seen.
    cpu = load_model(tmp_path / "foreign", head=head)
    assert relative_error(prefill(cpu, prompt), plain) < 0.1


@pytest.mark.parametrize("head", ["int8", "bf16"])
def test_foreign_codes_and_scales_are_used_as_they_are(
    llama: Path, tmp_path: Path, head: str
) -> None:
    meant = write_foreign(llama, tmp_path / "foreign", [], [])
    stored = tensors_of(tmp_path / "foreign")
    assert open_checkpoint(tmp_path / "foreign").quantized >= {"lm_head", *MLP_1}
    outer, *layers = convert_all(tmp_path / "foreign", head=head)

    def assert_holds(piece: Piece, name: str, linears: list[str]) -> None:
        codes_NK = torch.cat([stored[f"{linear}.weight"] for linear in linears]).numpy()
        scale_N = torch.cat([stored[f"{linear}.weight_scale"] for linear in linears])[:, 0]
        assert scale_N.dtype == torch.bfloat16
        packed = piece[f"{name}.weight"]
        unpacked = packed.transpose(0, 2, 1, 3).reshape(packed.shape[0] * 16, -1)
        np.testing.assert_array_equal(unpacked[: len(codes_NK), : codes_NK.shape[1]], codes_NK)
        np.testing.assert_array_equal(piece[f"{name}.scale"], scale_N.float().numpy())

    for index, piece in enumerate(layers):
        for group, linears in GROUPS.items():
            assert_holds(piece, group, [f"model.layers.{index}.{linear}" for linear in linears])
    if head == "int8":
        assert_holds(outer, "head", ["lm_head"])
    else:
        assert torch.equal(to_torch(outer["head.weight"]), meant["lm_head.weight"].bfloat16())
        assert "head.scale" not in outer


# --- What is refused ---


@pytest.fixture
def made(llama: Path, tmp_path: Path) -> Path:
    write(llama, tmp_path / "made")
    return tmp_path / "made"


@pytest.mark.parametrize(
    ("ignored", "inside"),
    [
        ("model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.q_proj"),
        ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"),
        ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj"),
    ],
)
def test_a_fused_group_quantized_in_part_is_refused(
    made: Path, llama: Path, ignored: str, inside: str
) -> None:
    raw = config_of(made)["quantization_config"]
    edit_config(made, quantization_config=raw | {"ignore": ["lm_head", ignored]})
    weight = tensors_of(llama)[f"{ignored}.weight"]
    change_tensors(made, **{f"{ignored}.weight": weight, f"{ignored}.weight_scale": None})
    with pytest.raises(CheckpointError, match=f"made: {inside} is int8 and {ignored} is not"):
        open_checkpoint(made)


Q_PROJ = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize("shape", [(64,), (1, 64), (1, 1), (64, 2), (32, 1)], ids=str)
def test_scales_of_another_shape_are_refused(made: Path, shape: tuple[int, ...]) -> None:
    change_tensors(made, **{f"{Q_PROJ}.weight_scale": torch.ones(shape)})
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ}\.weight_scale has the shape"):
        open_checkpoint(made)


def test_weights_of_another_shape_are_refused(made: Path) -> None:
    change_tensors(made, **{f"{Q_PROJ}.weight": torch.ones(64, 32, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ}\.weight has the shape"):
        open_checkpoint(made)


def test_a_missing_scale_is_refused(made: Path) -> None:
    change_tensors(made, **{f"{Q_PROJ}.weight_scale": None})
    with pytest.raises(
        CheckpointError, match=rf"tensors missing: 1, such as {Q_PROJ}\.weight_scale"
    ):
        open_checkpoint(made)


@pytest.mark.parametrize("suffix", ["weight_zero_point", "input_scale", "weight_shape"])
def test_a_tensor_of_another_scheme_is_refused(made: Path, suffix: str) -> None:
    change_tensors(made, **{f"{Q_PROJ}.{suffix}": torch.zeros(64, 1, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match=rf"not understood, such as {Q_PROJ}\.{suffix}"):
        open_checkpoint(made)


def test_a_scale_where_nothing_is_quantized_is_refused(made: Path) -> None:
    edit_config(made, quantization_config=None)
    with pytest.raises(CheckpointError, match=r"14 tensors not understood, such as .*weight_scale"):
        open_checkpoint(made)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int32], ids=str
)
def test_weights_that_are_not_int8_are_refused(made: Path, dtype: torch.dtype) -> None:
    change_tensors(made, **{f"{Q_PROJ}.weight": torch.ones(64, 64, dtype=dtype)})
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ}\.weight has dtype {dtype}, .* int8"):
        convert_all(made)


@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        (torch.ones(64, 1, dtype=torch.int8), "has dtype torch.int8"),
        (torch.full((64, 1), torch.nan), "holds NaN"),
        (torch.full((64, 1), torch.inf), "holds NaN or infinity"),
        (torch.full((64, 1), -0.01), "is not positive"),
        (torch.zeros(64, 1), "is not positive"),
    ],
    ids=["int8", "nan", "inf", "negative", "zero"],
)
def test_unusable_scales_are_refused(made: Path, scale: torch.Tensor, reason: str) -> None:
    change_tensors(made, **{f"{Q_PROJ}.weight_scale": scale})
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ}\.weight_scale {reason}"):
        convert_all(made)


def test_int8_where_the_config_says_float_is_refused(made: Path) -> None:
    down = "model.layers.0.mlp.down_proj"
    raw = config_of(made)["quantization_config"]
    edit_config(made, quantization_config=raw | {"ignore": ["lm_head", down]})
    with pytest.raises(CheckpointError, match=rf"not understood, such as {down}\.weight_scale"):
        open_checkpoint(made)
    change_tensors(made, **{f"{down}.weight_scale": None})
    with pytest.raises(
        CheckpointError, match=rf"{down}\.weight has dtype torch\.int8, which is not supported"
    ):
        convert_all(made)


def test_the_scheme_is_checked_before_the_tensors(made: Path) -> None:
    raw = config_of(made)["quantization_config"]
    edit_config(made, quantization_config=raw | {"format": "pack-quantized"})
    (made / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="format is 'pack-quantized'"):
        open_checkpoint(made)
