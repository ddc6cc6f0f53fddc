"""Reading a Hugging Face checkpoint: safetensors only, one tensor at a time, every name accounted for."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from quant.architecture import Architecture, read_architecture
from quant.errors import CheckpointError

HEAD, EMBEDDINGS, FINAL_NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt"]


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


def find_checkpoint(model: str) -> Path:
    """Resolve a folder or a hub id to a local folder; raises CheckpointError if there is none."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{model}: is a file; give the folder of a Hugging Face checkpoint")
    if model.count("/") > 1 or model.startswith((".", "/", "~")):
        raise CheckpointError(f"{model}: no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_PATTERNS))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{model}: no such folder, and not to be had from the model hub ({reason})"
        ) from error


def open_checkpoint(folder: Path) -> Checkpoint:
    """Index a checkpoint and check that its tensors are exactly those its config calls for."""
    architecture = read_architecture(folder)
    files = _index(folder)
    expected = set(tensor_names(architecture))
    if architecture.tied_head:
        files.pop(HEAD, None)  # Some exporters write the tied copy too.
    present = {name for name in files if not name.endswith("rotary_emb.inv_freq")}
    if missing := sorted(expected - present):
        raise CheckpointError(f"{folder}: {len(missing)} tensors missing, such as {missing[0]}")
    if unknown := sorted(present - expected):
        raise CheckpointError(
            f"{folder}: {len(unknown)} tensors not understood, such as {unknown[0]}"
        )
    return Checkpoint(folder, architecture, files)


def tensor_names(architecture: Architecture) -> Iterator[str]:
    """Every tensor name that the architecture needs, in Hugging Face's spelling."""
    yield EMBEDDINGS
    yield FINAL_NORM
    if not architecture.tied_head:
        yield HEAD
    for index in range(architecture.num_layers):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight"
        yield f"{layer}.post_attention_layernorm.weight"
        if architecture.qk_norm:
            yield f"{layer}.self_attn.q_norm.weight"
            yield f"{layer}.self_attn.k_norm.weight"
        for group, parts, bias in linear_groups(architecture):
            for part in parts:
                yield f"{layer}.{group}.{part}.weight"
                if bias:
                    yield f"{layer}.{group}.{part}.bias"


def linear_groups(architecture: Architecture) -> tuple[tuple[str, tuple[str, ...], bool], ...]:
    """The linears of a layer as they are fused: (module, projections, has a bias)."""
    return (
        ("self_attn", ("q_proj", "k_proj", "v_proj"), architecture.qkv_bias),
        ("self_attn", ("o_proj",), architecture.o_bias),
        ("mlp", ("gate_proj", "up_proj"), architecture.mlp_bias),
        ("mlp", ("down_proj",), architecture.mlp_bias),
    )


def _index(folder: Path) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as handle:
                files.update(dict.fromkeys(handle.keys(), path))
        except SafetensorError as error:
            raise CheckpointError(f"{path}: damaged safetensors file ({error})") from error
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if absent := sorted(name for name in named if not (folder / name).is_file()):
            raise CheckpointError(f"{folder}: {absent[0]} is missing ({index.name} names it)")
    if files:
        return files
    pickles = [p.name for p in sorted(folder.iterdir()) if p.suffix in (".bin", ".pt", ".pth")]
    if pickles:
        raise CheckpointError(
            f"{folder}: holds only pickle files ({pickles[0]}), which can run code and are refused; "
            "convert the checkpoint to safetensors"
        )
    raise CheckpointError(f"{folder}: no *.safetensors file")
