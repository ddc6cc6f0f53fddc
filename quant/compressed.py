"""Writes a quantized checkpoint: a Hugging Face folder in the compressed-tensors format (`quant.scheme`).

It is self-contained: smoothing is folded into norms and weights, tokenizer and generation settings are
copied, and `quasar.json` says how it was made. It appears under its name whole, or not at all.
"""

import contextlib
import glob
import json
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from quant.architecture import read_raw_config
from quant.calibrate import Treatment
from quant.checkpoint import EMBEDDINGS, FINAL_NORM, HEAD, Checkpoint, linear_groups
from quant.config import QuantConfig
from quant.errors import CheckpointError
from quant.quantize import layer_tensors
from quant.scheme import make_scheme

REPORT = "quasar.json"
_ABANDONED = 3600.0  # Seconds after which a folder in the making is no longer worked on.
_MAX_SHARD_BYTES = 4 * 2**30
_WEIGHT_SUFFIXES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".onnx")
_COPIED_SUFFIXES = (".json", ".jinja", ".model", ".txt")


def write_quantized(
    checkpoint: Checkpoint,
    config: QuantConfig,
    treatment: Treatment,
    folder: Path,
    report: dict[str, Any],
    max_shard_bytes: int = _MAX_SHARD_BYTES,
) -> None:
    """Write the checkpoint that the treatment makes to `folder`, which must not exist or be empty.

    Raises:
        CheckpointError: a tensor cannot be read or quantized.
        OSError: the folder cannot be written, or is not empty.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_folder(folder)
    partial.mkdir()
    try:
        _copy_settings(checkpoint.folder, partial)
        _write_weights(_tensors(checkpoint, config, treatment), partial, max_shard_bytes)
        _write_json(partial / "config.json", _describe(checkpoint, treatment))
        _write_json(partial / REPORT, report)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def partial_folder(folder: Path) -> Path:
    """Where `folder` is made before it gets its name; what killed processes left there is removed."""
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.*.partial"):
        with contextlib.suppress(OSError):  # Another process may be faster.
            if time.time() - left.stat().st_mtime > _ABANDONED:
                shutil.rmtree(left)
    return folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.partial")


def read_report(folder: Path) -> dict[str, Any] | None:
    """What `quasar.json` says of a folder that this project wrote; None if it wrote none."""
    path = folder / REPORT
    if not path.is_file():
        return None
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(report, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return report


def float_linears(checkpoint: Checkpoint, treatment: Treatment) -> list[str]:
    """The linears of layers that stay in floating point, by Hugging Face's names."""
    return [
        f"model.layers.{index}.{linear}"
        for index in range(checkpoint.architecture.num_layers)
        for group in linear_groups(checkpoint.architecture)
        for linear in group.linears
        if (index, group.name) in treatment.float_groups
    ]


def _tensors(
    checkpoint: Checkpoint, config: QuantConfig, treatment: Treatment
) -> Iterator[dict[str, torch.Tensor]]:
    yield {EMBEDDINGS: checkpoint.read(EMBEDDINGS)}
    for index in range(checkpoint.architecture.num_layers):
        layer = layer_tensors(checkpoint, config, treatment, index)
        yield {f"model.layers.{index}.{name}": tensor for name, tensor in layer.items()}
    yield {FINAL_NORM: checkpoint.read(FINAL_NORM)}
    if not checkpoint.architecture.tied_head:
        yield {HEAD: checkpoint.read(HEAD)}


def _write_weights(
    pieces: Iterator[dict[str, torch.Tensor]], folder: Path, max_shard_bytes: int
) -> None:
    """One file, or several with an index where one would be larger than `max_shard_bytes`."""
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    total = 0
    for piece in pieces:
        size = _num_bytes(piece)
        if shard and _num_bytes(shard) + size > max_shard_bytes:
            shards.append(_write_shard(shard, folder, len(shards)))
            shard = {}
        shard |= piece
        total += size
    shards.append(_write_shard(shard, folder, len(shards)))
    if len(shards) == 1:
        _shard_path(folder, 0).rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        _shard_path(folder, number).rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_shard(shard: dict[str, torch.Tensor], folder: Path, number: int) -> list[str]:
    tensors = {name: tensor.contiguous() for name, tensor in shard.items()}
    try:
        save_file(tensors, _shard_path(folder, number), metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    return list(shard)


def _shard_path(folder: Path, number: int) -> Path:
    return folder / f"model-{number + 1:05d}.safetensors"


def _num_bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _describe(checkpoint: Checkpoint, treatment: Treatment) -> dict[str, Any]:
    """The source's config.json with the quantization in it."""
    raw = read_raw_config(checkpoint.folder)
    ignore = ["lm_head", *float_linears(checkpoint, treatment)]
    return raw | {"quantization_config": make_scheme(ignore)}


def _copy_settings(source: Path, target: Path) -> None:
    """Tokenizer, chat template, generation settings: every small file that is no weights."""
    for path in sorted(source.iterdir()):
        is_weights = path.name.endswith(_WEIGHT_SUFFIXES)
        if path.is_file() and path.suffix in _COPIED_SUFFIXES and not is_weights:
            shutil.copyfile(path, target / path.name)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
