"""The compressed-tensors scheme of a checkpoint: int8 weights per channel, int8 activations per token.

`int-quantized` is what vLLM, SGLang and transformers read and what llm-compressor writes: `X.weight` int8
[out, in] and `X.weight_scale` [out, 1] for every quantized linear X, all other tensors as they were, and
a `quantization_config` in config.json that says which linears are meant. Codes may lie in [-128, 127].
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant.errors import CheckpointError

_FORMAT = "int-quantized"
_WEIGHTS: dict[str, Any] = {
    "num_bits": 8,
    "type": "int",
    "strategy": "channel",
    "symmetric": True,
    "dynamic": False,
    "group_size": None,
    "block_structure": None,
    "actorder": None,
}
_ACTIVATIONS: dict[str, Any] = {
    "num_bits": 8,
    "type": "int",
    "strategy": "token",
    "symmetric": True,
    "dynamic": True,
    "group_size": None,
    "block_structure": None,
    "actorder": None,
}


@dataclass(frozen=True)
class Scheme:
    """Which linears are quantized: those a target matches and no `ignore` entry does."""

    targets: tuple[str, ...]
    ignore: tuple[str, ...]

    def covers(self, linear: str) -> bool:
        """Whether the linear of this name is quantized."""
        is_target = "Linear" in self.targets or any(_matches(linear, t) for t in self.targets)
        return is_target and not any(_matches(linear, entry) for entry in self.ignore)


def read_scheme(raw: dict[str, Any], folder: Path) -> Scheme | None:
    """The scheme of a checkpoint's config.json, or None if it is not quantized.

    Raises:
        CheckpointError: it is quantized in a way that is not supported; the message names it.
    """
    config = raw.get("quantization_config") or raw.get("compression_config")
    if not config:
        return None
    _check_type(folder, "quantization_config", config, dict)
    method = config.get("quant_method", "unknown")
    if method != "compressed-tensors":
        raise CheckpointError(
            f"{folder}: already quantized ({method}); supported are floating-point checkpoints and "
            "compressed-tensors with int8 weights and activations"
        )
    for key in ("transform_config", "kv_cache_scheme"):
        _expect(folder, key, config.get(key) or None, None)
    _expect(folder, "format", config.get("format"), _FORMAT)
    sparsity = (config.get("sparsity_config") or {}).get("format")
    _expect(folder, "sparsity_config.format", "dense" if sparsity is None else sparsity, "dense")
    targets: list[str] = []
    groups = config.get("config_groups") or {}
    _check_type(folder, "config_groups", groups, dict)
    for name, group in groups.items():
        targets += _read_group(folder, name, group)
    ignore = _read_patterns(folder, "ignore", config.get("ignore"))
    return Scheme(tuple(targets), tuple(ignore))


def _read_group(folder: Path, name: str, group: Any) -> list[str]:
    """The targets of a group, whose scheme is checked."""
    _check_type(folder, name, group, dict)
    _expect(folder, f"{name}.format", group.get("format") or _FORMAT, _FORMAT)
    _expect(folder, f"{name}.output_activations", group.get("output_activations"), None)
    for key, fields in (("weights", _WEIGHTS), ("input_activations", _ACTIVATIONS)):
        given = group.get(key) or {}
        _check_type(folder, f"{name}.{key}", given, dict)
        for field, value in fields.items():
            _expect(folder, f"{name}.{key}.{field}", given.get(field), value)
    return _read_patterns(folder, f"{name}.targets", group.get("targets"))


def _read_patterns(folder: Path, key: str, patterns: Any) -> list[str]:
    """Names, and regular expressions behind "re:"."""
    patterns = patterns or []
    _check_type(folder, key, patterns, list)
    for pattern in patterns:
        _check_type(folder, key, pattern, str)
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            raise CheckpointError(
                f"{folder}: quantization_config: {key}: {pattern!r} is no pattern ({error})"
            ) from error
    return list(patterns)


def make_scheme(ignore: list[str]) -> dict[str, Any]:
    """The `quantization_config` for int8 linears, but for those of the names in `ignore`."""
    group = {
        "targets": ["Linear"],
        "weights": _WEIGHTS | {"observer": "minmax"},
        "input_activations": _ACTIVATIONS | {"observer": None},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMAT,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ignore,
        "config_groups": {"group_0": group},
    }


def _matches(linear: str, pattern: str) -> bool:
    """compressed-tensors' rule: a regular expression behind "re:", else the name itself."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], linear) is not None
    return pattern == linear


def _expect(folder: Path, key: str, value: Any, wanted: Any) -> None:
    if value != wanted:
        raise CheckpointError(
            f"{folder}: quantization_config: {key} is {value!r}, and only {wanted!r} is supported"
        )


def _check_type(folder: Path, key: str, value: Any, wanted: type) -> None:
    if not isinstance(value, wanted):
        raise CheckpointError(
            f"{folder}: quantization_config: {key} is {value!r}, not a {wanted.__name__}"
        )
