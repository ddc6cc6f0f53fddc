"""Which quantized checkpoints are understood; the others are refused by what is wrong with them."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from quant.errors import CheckpointError
from quant.scheme import Scheme, make_scheme, read_scheme

FOLDER = Path("some") / "checkpoint"
# As llm-compressor 0.9 writes it for an INT8 W8A8 model, with the keys that say nothing about numbers.
LLM_COMPRESSOR: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "format": "int-quantized",
            "input_activations": {
                "actorder": None,
                "block_structure": None,
                "dynamic": True,
                "group_size": None,
                "num_bits": 8,
                "observer": None,
                "observer_kwargs": {},
                "strategy": "token",
                "symmetric": True,
                "type": "int",
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": None,
                "num_bits": 8,
                "observer": "mse",
                "observer_kwargs": {"norm": 2.4},
                "strategy": "channel",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "int-quantized",
    "global_compression_ratio": 1.46,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.12.2",
}
Q_PROJ, DOWN_PROJ = "model.layers.0.self_attn.q_proj", "model.layers.11.mlp.down_proj"
_REMOVED = object()


def edited(path: str, value: Any) -> dict[str, Any]:
    """The quantization_config with one value of it, by its dotted path, replaced or removed."""
    config = copy.deepcopy(LLM_COMPRESSOR)
    *parents, last = path.split(".")
    place = config
    for key in parents:
        place = place.setdefault(key, {})
    if value is _REMOVED:
        del place[last]
    else:
        place[last] = value
    return config


def read(config: dict[str, Any]) -> Scheme | None:
    return read_scheme({"model_type": "llama", "quantization_config": config}, FOLDER)


def scheme_of(**changes: Any) -> Scheme:
    """The scheme read from LLM_COMPRESSOR with other targets or another `ignore`."""
    config = copy.deepcopy(LLM_COMPRESSOR)
    if "targets" in changes:
        config["config_groups"]["group_0"]["targets"] = changes["targets"]
    if "ignore" in changes:
        config["ignore"] = changes["ignore"]
    scheme = read(config)
    assert scheme is not None
    return scheme


# --- What is read ---


@pytest.mark.parametrize(
    "raw",
    [{}, {"quantization_config": None}, {"quantization_config": {}}, {"compression_config": None}],
    ids=str,
)
def test_floating_point_has_no_scheme(raw: dict[str, Any]) -> None:
    assert read_scheme(raw, FOLDER) is None


def test_what_llm_compressor_writes() -> None:
    assert read(LLM_COMPRESSOR) == Scheme(("Linear",), ("lm_head",))


def test_the_key_of_older_releases() -> None:
    raw = {"compression_config": LLM_COMPRESSOR}
    assert read_scheme(raw, FOLDER) == Scheme(("Linear",), ("lm_head",))
    raw = {"quantization_config": {}, "compression_config": edited("format", "pack-quantized")}
    with pytest.raises(CheckpointError, match="pack-quantized"):
        read_scheme(raw, FOLDER)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("sparsity_config", _REMOVED),
        ("sparsity_config", None),
        ("sparsity_config", {"format": "dense", "sparsity_structure": "unstructured"}),
        ("kv_cache_scheme", _REMOVED),
        ("quantization_status", "frozen"),
        ("config_groups.group_0.format", _REMOVED),
        ("config_groups.group_0.format", None),
        ("config_groups.group_0.output_activations", _REMOVED),
        ("config_groups.group_0.weights.observer", "minmax"),
        ("config_groups.group_0.weights.actorder", _REMOVED),
        ("config_groups.group_0.weights.group_size", _REMOVED),
        ("config_groups.group_0.input_activations.block_structure", _REMOVED),
    ],
)
def test_what_changes_no_number_is_accepted(path: str, value: Any) -> None:
    assert read(edited(path, value)) == Scheme(("Linear",), ("lm_head",))


def test_nothing_is_ignored_without_a_list() -> None:
    for value in (_REMOVED, None, []):
        assert read(edited("ignore", value)) == Scheme(("Linear",), ())


def test_the_targets_of_all_groups_count() -> None:
    config = copy.deepcopy(LLM_COMPRESSOR)
    group = config["config_groups"]["group_0"]
    config["config_groups"] = {
        "attention": group | {"targets": [Q_PROJ]},
        "mlp": group | {"targets": ["re:.*down_proj$", "re:.*up_proj$"]},
    }
    scheme = read(config)
    assert scheme == Scheme((Q_PROJ, "re:.*down_proj$", "re:.*up_proj$"), ("lm_head",))
    config["config_groups"]["mlp"] = copy.deepcopy(group)
    config["config_groups"]["mlp"]["weights"]["num_bits"] = 4
    with pytest.raises(CheckpointError, match=r"mlp\.weights\.num_bits is 4, and only 8"):
        read(config)


# --- What is refused ---


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"bits": 8}, "unknown"),
    ],
)
def test_other_methods_are_refused_by_name(config: dict[str, Any], name: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"{FOLDER}: already quantized ({name})")):
        read(config)


GROUP = "config_groups.group_0"


@pytest.mark.parametrize(
    ("path", "value", "wanted"),
    [
        ("format", "pack-quantized", "int-quantized"),
        ("format", "float-quantized", "int-quantized"),
        ("format", "naive-quantized", "int-quantized"),
        ("format", _REMOVED, "int-quantized"),
        ("kv_cache_scheme", {"num_bits": 8, "type": "float", "strategy": "tensor"}, None),
        ("sparsity_config.format", "sparse-24-bitmask", "dense"),
        ("sparsity_config.format", "sparse-bitmask", "dense"),
        (f"{GROUP}.format", "pack-quantized", "int-quantized"),
        (f"{GROUP}.format", "float-quantized", "int-quantized"),
        (f"{GROUP}.output_activations", {"num_bits": 8, "type": "int"}, None),
        (f"{GROUP}.weights.num_bits", 4, 8),
        (f"{GROUP}.weights.type", "float", "int"),
        (f"{GROUP}.weights.strategy", "group", "channel"),
        (f"{GROUP}.weights.strategy", "tensor", "channel"),
        (f"{GROUP}.weights.symmetric", False, True),
        (f"{GROUP}.weights.dynamic", True, False),
        (f"{GROUP}.weights.group_size", 128, None),
        (f"{GROUP}.weights.block_structure", [128, 128], None),
        (f"{GROUP}.weights.actorder", "group", None),
        (f"{GROUP}.input_activations.num_bits", 4, 8),
        (f"{GROUP}.input_activations.type", "float", "int"),
        (f"{GROUP}.input_activations.strategy", "tensor", "token"),
        (f"{GROUP}.input_activations.strategy", "group", "token"),
        (f"{GROUP}.input_activations.symmetric", False, True),
        (f"{GROUP}.input_activations.dynamic", False, True),
        (f"{GROUP}.input_activations.dynamic", "local", True),
        (f"{GROUP}.input_activations.group_size", 64, None),
        (f"{GROUP}.input_activations.block_structure", [1, 64], None),
        (f"{GROUP}.input_activations.actorder", "group", None),
    ],
)
def test_other_schemes_are_refused_by_the_key(path: str, value: Any, wanted: Any) -> None:
    found = None if value is _REMOVED else value
    key = path.removeprefix("config_groups.")
    message = f"{FOLDER}: quantization_config: {key} is {found!r}, and only {wanted!r} is supported"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        read(edited(path, value))


@pytest.mark.parametrize("key", ["input_activations", "weights"])
@pytest.mark.parametrize("value", [_REMOVED, None], ids=["absent", "null"])
def test_weights_or_activations_alone_are_refused(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"group_0\.{key}\.num_bits is None, and only 8"):
        read(edited(f"{GROUP}.{key}", value))


# --- Which linears are meant ---


def test_linear_means_every_linear() -> None:
    scheme = scheme_of(targets=["Linear"], ignore=[])
    assert scheme.covers(Q_PROJ)
    assert scheme.covers(DOWN_PROJ)
    assert scheme.covers("lm_head")


@pytest.mark.parametrize(
    ("target", "q_proj", "down_proj", "head"),
    [
        (Q_PROJ, True, False, False),
        ("lm_head", False, False, True),
        ("q_proj", False, False, False),  # A name is the whole name,
        (r"re:model\.layers\.0", True, False, False),  # an expression need match its start only,
        (r"re:model\.layers\.1", False, True, False),
        ("re:q_proj", False, False, False),  # but does match at the start,
        ("re:.*proj", True, True, False),
        (r"re:.*layers\.\d\.", True, False, False),
        (f"re:{re.escape(Q_PROJ)}$", True, False, False),
        ("LINEAR", False, False, False),
        ("Embedding", False, False, False),
    ],
)
def test_targets_and_ignored_names(target: str, q_proj: bool, down_proj: bool, head: bool) -> None:
    matched = {Q_PROJ: q_proj, DOWN_PROJ: down_proj, "lm_head": head}
    targeted = scheme_of(targets=[target], ignore=[])
    ignored = scheme_of(targets=["Linear"], ignore=[target])
    for name, matches in matched.items():
        assert targeted.covers(name) == matches
        assert ignored.covers(name) != matches


def test_ignore_wins_over_every_target() -> None:
    scheme = scheme_of(targets=["Linear", Q_PROJ, "re:.*"], ignore=["lm_head", "re:.*q_proj"])
    assert [scheme.covers(name) for name in (Q_PROJ, DOWN_PROJ, "lm_head")] == [False, True, False]


def test_one_of_several_targets_is_enough() -> None:
    scheme = scheme_of(targets=["re:.*down_proj", Q_PROJ], ignore=[])
    assert [scheme.covers(name) for name in (Q_PROJ, DOWN_PROJ, "lm_head")] == [True, True, False]


# --- What is written ---


def test_what_is_written_is_the_form_of_llm_compressor() -> None:
    made = json.loads(json.dumps(make_scheme(["lm_head", Q_PROJ])))
    assert made["ignore"] == ["lm_head", Q_PROJ]
    for key in ("quant_method", "format", "quantization_status", "kv_cache_scheme"):
        assert made[key] == LLM_COMPRESSOR[key]
    ours, theirs = (c["config_groups"] for c in (made, LLM_COMPRESSOR))
    assert ours.keys() == {"group_0"}
    assert ours["group_0"].keys() == theirs["group_0"].keys() - {"format"}
    assert ours["group_0"]["targets"] == ["Linear"]
    assert ours["group_0"]["output_activations"] is None
    for key in ("weights", "input_activations"):
        expected = {
            field: value
            for field, value in theirs["group_0"][key].items()
            if not field.startswith("observer")
        }
        assert {k: v for k, v in ours["group_0"][key].items() if k != "observer"} == expected


def test_what_is_written_can_be_read() -> None:
    made = json.loads(json.dumps(make_scheme(["lm_head", Q_PROJ])))
    assert read(made) == Scheme(("Linear",), ("lm_head", Q_PROJ))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ignore": ["re:("]}, "ignore: 're:(' is no pattern"),
        ({"ignore": "lm_head"}, "ignore is 'lm_head', not a list"),
        ({"ignore": [3]}, "ignore is 3, not a str"),
        ({"config_groups": ["group_0"]}, "config_groups is ['group_0'], not a dict"),
        ({"config_groups": {"group_0": "W8A8"}}, "group_0 is 'W8A8', not a dict"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config is"),
    ],
    ids=str,
)
def test_what_is_malformed_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(words)):
        read(LLM_COMPRESSOR | changes)


def test_a_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(CheckpointError, match="quantization_config is 'int8', not a dict"):
        read_scheme({"quantization_config": "int8"}, FOLDER)
    with pytest.raises(CheckpointError, match="targets is 'Linear', not a list"):
        scheme_of(targets="Linear")
