"""The shape of a supported decoder, read from a checkpoint's config.json.

One table describes the families; everything that differs between them is a field here, so that the
model itself knows no family by name.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quant.errors import CheckpointError

ROPE_KINDS = ("default", "linear", "llama3", "yarn")

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)


@dataclass(frozen=True)
class Family:
    """What a model type adds to the plain decoder; None: the checkpoint's config decides."""

    qkv_bias: bool | None
    o_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool


FAMILIES = {
    "llama": Family(qkv_bias=None, o_bias=None, mlp_bias=None, qk_norm=False),
    "mistral": Family(qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False),
    "qwen2": Family(qkv_bias=True, o_bias=False, mlp_bias=False, qk_norm=False),
    "qwen3": Family(qkv_bias=None, o_bias=None, mlp_bias=False, qk_norm=True),
}


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer with RMSNorm, RoPE, grouped-query attention and a gated MLP.

    `rope_inv_freq` holds head_dim / 2 inverse frequencies (float32 values), `rope_scaling` the
    factor on the cosines and sines (yarn; else 1). `windows` holds one entry per layer: the number
    of positions a query sees, its own included, or 0 for all of them.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position_embeddings: int
    tied_head: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope_inv_freq: tuple[float, ...]
    rope_scaling: float
    windows: tuple[int, ...]
    eos_token_ids: tuple[int, ...]

    @property
    def qkv_size(self) -> int:
        """Width of the fused query/key/value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def read_architecture(folder: Path) -> Architecture:
    """Read and check `folder/config.json`; raises CheckpointError with the reason."""
    raw = read_raw_config(folder)
    model_type = raw.get("model_type")
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"{folder}: model_type {model_type!r} is not supported (supported: "
            f"{', '.join(FAMILIES)}); code shipped with a checkpoint is never run"
        )
    config = _parse_config(folder)
    _check_sizes(folder, config)
    if config.hidden_act != "silu":
        raise CheckpointError(f"{folder}: hidden_act {config.hidden_act!r} is not supported")
    family = FAMILIES[model_type]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention_bias = bool(getattr(config, "attention_bias", False))
    inv_freq, rope_scaling = _rope(folder, config, head_dim)
    return Architecture(
        model_type=model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        tied_head=bool(config.tie_word_embeddings),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False))
        if family.mlp_bias is None
        else family.mlp_bias,
        qk_norm=family.qk_norm,
        rope_inv_freq=inv_freq,
        rope_scaling=rope_scaling,
        windows=_windows(folder, config),
        eos_token_ids=_eos_token_ids(folder, config),
    )


def _check_sizes(folder: Path, config: Any) -> None:
    """Refuse sizes that no decoder has."""
    for key in _SIZES:
        value = getattr(config, key)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{folder / 'config.json'}: {key} is {value!r}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise CheckpointError(
            f"{folder / 'config.json'}: {config.num_attention_heads} attention heads cannot share "
            f"{config.num_key_value_heads} key/value heads"
        )


def read_raw_config(folder: Path) -> dict[str, Any]:
    """config.json as it stands; raises CheckpointError if there is none or it is damaged."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: no config.json, so this is no Hugging Face checkpoint")
    return _read_json(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return raw


def _parse_config(folder: Path) -> Any:
    """Transformers' own reading of config.json, which knows every legacy spelling."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # Foreign content in foreign code: any error says what is wrong.
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error


def _rope(folder: Path, config: Any, head_dim: int) -> tuple[tuple[float, ...], float]:
    parameters = config.rope_parameters
    kind = parameters["rope_type"]
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"{folder}: RoPE scaling {kind!r} is not supported (supported: {', '.join(ROPE_KINDS)})"
        )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(f"{folder}: partial rotary embeddings are not supported")
    if kind == "default":
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inv_freq, scaling = 1.0 / parameters["rope_theta"] ** exponent, 1.0
    else:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return tuple(inv_freq.float().tolist()), float(scaling)


def _windows(folder: Path, config: Any) -> tuple[int, ...]:
    """Sliding window per layer, 0 where a layer attends to everything."""
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise CheckpointError(f"{folder}: layer types {sorted(unknown)} are not supported")
    return tuple(window if window and kind == "sliding_attention" else 0 for kind in kinds)


def _eos_token_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """Every EOS id that generation_config.json names, else config.json's."""
    path = folder / "generation_config.json"
    ids = config.eos_token_id
    if path.is_file():
        ids = _read_json(path).get("eos_token_id", ids)
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(i, int) and 0 <= i < config.vocab_size for i in ids):
        raise CheckpointError(f"{folder}: eos_token_id {ids} is not within the vocabulary")
    return tuple(ids)
