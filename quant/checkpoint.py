"""Reading a Hugging Face checkpoint: safetensors only, one tensor at a time, every name accounted for."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from quant.architecture import Architecture, read_architecture
from quant.errors import CheckpointError

HEAD, EMBEDDINGS, FINAL_NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"


@dataclass(frozen=True)
class Checkpoint:
    """A folder of safetensors with the file that holds each tensor."""

    folder: Path
    architecture: Architecture
    files: dict[str, Path]

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor in its stored dtype; raises CheckpointError if it cannot be read."""
        try:
            with safe_open(self.files[name], framework="pt") as handle:
                return handle.get_tensor(name)  # type: ignore[no-any-return]
        except SafetensorError as error:
            raise CheckpointError(f"{self.files[name]}: {name}: {error}") from error

    def digest(self) -> str:
        """Content digest (sha256, hex) of the configuration and of every weight file."""
        digest = hashlib.sha256()
        configs = [self.folder / "config.json", self.folder / "generation_config.json"]
        for path in [*configs, *sorted(set(self.files.values()))]:
            if path.is_file():
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


def open_checkpoint(folder: Path) -> Checkpoint:
    """Index a checkpoint and check that its tensors are exactly those its config calls for."""
    architecture = read_architecture(folder)
    files, shapes = _index(folder)
    expected = tensor_shapes(architecture)
    present = {name for name in shapes if not name.endswith("rotary_emb.inv_freq")}
    if architecture.tied_head:
        present.discard(HEAD)  # Some exporters write the tied copy too.
    if missing := sorted(expected.keys() - present):
        raise CheckpointError(f"{folder}: {len(missing)} tensors missing, such as {missing[0]}")
    if unknown := sorted(present - expected.keys()):
        raise CheckpointError(
            f"{folder}: {len(unknown)} tensors not understood, such as {unknown[0]}"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise CheckpointError(
                f"{files[name]}: {name} has the shape {shapes[name]}, config.json says {shape}"
            )
    return Checkpoint(folder, architecture, {name: files[name] for name in expected})


def tensor_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor that the architecture needs, by Hugging Face's name, with its shape."""
    a = architecture
    hidden, q_size, kv_size = a.hidden_size, a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    outputs = {
        "q_proj": q_size,
        "k_proj": kv_size,
        "v_proj": kv_size,
        "o_proj": hidden,
        "gate_proj": a.intermediate_size,
        "up_proj": a.intermediate_size,
        "down_proj": hidden,
    }
    inputs = {"o_proj": q_size, "down_proj": a.intermediate_size}
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDINGS: (a.vocab_size, hidden),
        FINAL_NORM: (hidden,),
    }
    if not a.tied_head:
        shapes[HEAD] = (a.vocab_size, hidden)
    for index in range(a.num_layers):
        layer = f"model.layers.{index}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{norm}.weight"] = (hidden,)
        for norm in ("q_norm", "k_norm") if a.qk_norm else ():
            shapes[f"{layer}.self_attn.{norm}.weight"] = (a.head_dim,)
        for module, parts, bias in linear_groups(a):
            for part in parts:
                shapes[f"{layer}.{module}.{part}.weight"] = (
                    outputs[part],
                    inputs.get(part, hidden),
                )
                if bias:
                    shapes[f"{layer}.{module}.{part}.bias"] = (outputs[part],)
    return shapes


def linear_groups(architecture: Architecture) -> tuple[tuple[str, tuple[str, ...], bool], ...]:
    """The linears of a layer as they are fused: (module, projections, has a bias)."""
    return (
        ("self_attn", ("q_proj", "k_proj", "v_proj"), architecture.qkv_bias),
        ("self_attn", ("o_proj",), architecture.o_bias),
        ("mlp", ("gate_proj", "up_proj"), architecture.mlp_bias),
        ("mlp", ("down_proj",), architecture.mlp_bias),
    )


def _index(folder: Path) -> tuple[dict[str, Path], dict[str, tuple[int, ...]]]:
    """The file and the shape of every tensor of the folder."""
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 - no mapping
                    files[name] = path
                    shapes[name] = tuple(handle.get_slice(name).get_shape())
        except SafetensorError as error:
            raise CheckpointError(f"{path}: damaged safetensors file ({error})") from error
    return files, shapes


def _weight_files(folder: Path) -> list[Path]:
    """The files transformers would load: those the index names, else model.safetensors."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        try:
            named = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index}: not a safetensors index ({error!r})") from error
        if absent := [name for name in named if not (folder / name).is_file()]:
            raise CheckpointError(f"{folder}: {absent[0]} is missing ({index.name} names it)")
        return [folder / name for name in named]
    if single.is_file():
        return [single]
    pickles = [p.name for p in sorted(folder.iterdir()) if p.suffix in (".bin", ".pt", ".pth")]
    if pickles:
        raise CheckpointError(
            f"{folder}: holds only pickle files ({pickles[0]}), which can run code and are refused; "
            "convert the checkpoint to safetensors"
        )
    raise CheckpointError(f"{folder}: neither model.safetensors nor {index.name}")
