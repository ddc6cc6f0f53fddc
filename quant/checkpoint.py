"""Reading a Hugging Face checkpoint: safetensors only, one tensor at a time, every name accounted for."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from quant.architecture import Architecture, read_architecture, read_raw_config
from quant.errors import CheckpointError
from quant.scheme import read_scheme

HEAD, EMBEDDINGS, FINAL_NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class LinearGroup:
    """Linears of a layer that share their input and are fused into one; names within the layer."""

    name: str
    linears: tuple[str, ...]
    has_bias: bool


@dataclass(frozen=True)
class Checkpoint:
    """A folder of safetensors: the file that holds each tensor.

    `quantized` names the int8 linears of a quantized checkpoint (all may have been left in floating
    point); None: it is not a quantized one.
    """

    folder: Path
    architecture: Architecture
    files: dict[str, Path]
    quantized: frozenset[str] | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether its weights are to be run as they are."""
        return self.quantized is not None

    def is_int8(self, linear: str) -> bool:
        """Whether the linear of this name is quantized."""
        return self.quantized is not None and linear in self.quantized

    def read(self, name: str) -> torch.Tensor:
        """Read a floating-point tensor in its stored dtype; raises CheckpointError if it is none."""
        tensor = self._read(name)
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"{self.folder}: {name} has dtype {tensor.dtype}, which is not supported (supported: "
                f"{', '.join(str(dtype) for dtype in _FLOATS)})"
            )
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{self.folder}: {name} holds NaN or infinity")
        return tensor

    def read_codes(self, linear: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The int8 codes [N, K] and the float32 scales [N] of a quantized linear."""
        codes_NK = self._read(f"{linear}.weight")
        if codes_NK.dtype != torch.int8:
            raise CheckpointError(
                f"{self.folder}: {linear}.weight has dtype {codes_NK.dtype}, and the "
                "quantization_config says int8"
            )
        scale_N = self.read(f"{linear}.weight_scale").float().flatten()
        if (scale_N < 0).any() or codes_NK[scale_N == 0].any():
            raise CheckpointError(
                f"{self.folder}: {linear}.weight_scale is not positive everywhere"
            )
        return codes_NK, scale_N

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of what stays in floating point."""
        return self.read(FINAL_NORM).dtype

    def _read(self, name: str) -> torch.Tensor:
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
    """Index a checkpoint and check that its tensors are exactly those its config calls for.

    It may be in floating point, or quantized as `quant.scheme` describes.
    """
    raw = read_raw_config(folder)
    architecture = read_architecture(folder)
    scheme = read_scheme(raw, folder)
    quantized = None
    if scheme is not None:
        quantized = frozenset(filter(scheme.covers, linear_names(architecture)))
    files, shapes = _index(folder)
    expected = tensor_shapes(architecture)
    for linear in quantized or ():
        expected[f"{linear}.weight_scale"] = (expected[f"{linear}.weight"][0], 1)
    present = {name for name in shapes if not name.endswith("rotary_emb.inv_freq")}
    if architecture.tied_head:
        present.discard(HEAD)  # Some exporters write the tied copy too.
    if missing := sorted(expected.keys() - present):
        raise CheckpointError(f"{folder}: tensors missing: {len(missing)}, such as {missing[0]}")
    if unknown := sorted(present - expected.keys()):
        raise CheckpointError(
            f"{folder}: {len(unknown)} tensors not understood, such as {unknown[0]}"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise CheckpointError(
                f"{files[name]}: {name} has the shape {shapes[name]}, config.json says {shape}"
            )
    checkpoint = Checkpoint(
        folder, architecture, {name: files[name] for name in expected}, quantized
    )
    _check_groups(checkpoint)
    return checkpoint


def tensor_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor that the architecture needs, by Hugging Face's name, with its shape."""
    a = architecture
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDINGS: (a.vocab_size, a.hidden_size),
        FINAL_NORM: (a.hidden_size,),
    }
    if not a.tied_head:
        shapes[HEAD] = (a.vocab_size, a.hidden_size)
    for index in range(a.num_layers):
        for name, shape in layer_names(a).items():
            shapes[f"model.layers.{index}.{name}"] = shape
    return shapes


def layer_names(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer by their names within it, with their shapes."""
    a = architecture
    hidden, q_size, kv_size = a.hidden_size, a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    outputs = {
        "self_attn.q_proj": q_size,
        "self_attn.k_proj": kv_size,
        "self_attn.v_proj": kv_size,
        "self_attn.o_proj": hidden,
        "mlp.gate_proj": a.intermediate_size,
        "mlp.up_proj": a.intermediate_size,
        "mlp.down_proj": hidden,
    }
    inputs = {"self_attn.o_proj": q_size, "mlp.down_proj": a.intermediate_size}
    shapes: dict[str, tuple[int, ...]] = {
        f"{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")
    }
    for norm in ("q_norm", "k_norm") if a.qk_norm else ():
        shapes[f"self_attn.{norm}.weight"] = (a.head_dim,)
    for group in linear_groups(a):
        for linear in group.linears:
            shapes[f"{linear}.weight"] = (outputs[linear], inputs.get(linear, hidden))
            if group.has_bias:
                shapes[f"{linear}.bias"] = (outputs[linear],)
    return shapes


def linear_groups(architecture: Architecture) -> tuple[LinearGroup, ...]:
    """The linears of a layer as they are fused: qkv, o, gate_up, down."""
    a = architecture
    attention, mlp = "self_attn", "mlp"
    return (
        LinearGroup("qkv", tuple(f"{attention}.{x}_proj" for x in "qkv"), a.qkv_bias),
        LinearGroup("o", (f"{attention}.o_proj",), a.o_bias),
        LinearGroup("gate_up", (f"{mlp}.gate_proj", f"{mlp}.up_proj"), a.mlp_bias),
        LinearGroup("down", (f"{mlp}.down_proj",), a.mlp_bias),
    )


def linear_names(architecture: Architecture) -> list[str]:
    """Every linear that may be quantized, by Hugging Face's name; the head if it is not tied."""
    linears = [linear for group in linear_groups(architecture) for linear in group.linears]
    names = [f"model.layers.{i}.{x}" for i in range(architecture.num_layers) for x in linears]
    return names if architecture.tied_head else [*names, HEAD.removesuffix(".weight")]


def _check_groups(checkpoint: Checkpoint) -> None:
    """Linears that are fused must be quantized together."""
    for index in range(checkpoint.architecture.num_layers):
        for group in linear_groups(checkpoint.architecture):
            names = [f"model.layers.{index}.{linear}" for linear in group.linears]
            inside = [name for name in names if checkpoint.is_int8(name)]
            if inside and inside != names:
                float_one = next(name for name in names if not checkpoint.is_int8(name))
                raise CheckpointError(
                    f"{checkpoint.folder}: {inside[0]} is int8 and {float_one} is not; linears that "
                    "share their input must be quantized together"
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
