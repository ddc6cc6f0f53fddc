"""The shipped cluster.yaml, against the schema and the checks of the installed Ray. No cloud."""

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

CLUSTER_YAML = Path(__file__).parents[1] / "cluster.yaml"
SCHEMA = json.loads((Path(ray.__file__).parent / "autoscaler/ray-schema.json").read_text())
ACCELERATORS = {"GPU", "NPU", "TPU", "HPU", "neuron_cores"}


@pytest.fixture
def cluster() -> dict[str, Any]:
    loaded = yaml.safe_load(CLUSTER_YAML.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def workers(cluster: dict[str, Any]) -> dict[str, dict[str, Any]]:
    types = cluster["available_node_types"]
    return {name: node for name, node in types.items() if name != cluster["head_node_type"]}


def test_file_is_valid_for_rays_schema(cluster: dict[str, Any]) -> None:
    jsonschema.validate(cluster, SCHEMA)


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        ((), "no_such_key", 1),
        ((), "min_workers", 0),
        (("auth",), "no_such_key", "x"),
        (("available_node_types", "gpu_worker"), "no_such_key", 1),
        (("available_node_types", "gpu_worker", "resources"), "GPU", 0.5),
        (("available_node_types", "cpu_worker"), "worker_setup_commands", "not a list"),
    ],
)
def test_schema_rejects_a_broken_file(
    cluster: dict[str, Any], path: tuple[str, ...], key: str, value: object
) -> None:
    broken = copy.deepcopy(cluster)
    inner = broken
    for step in path:
        inner = inner[step]
    inner[key] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


def test_rays_own_validation_accepts_the_file(cluster: dict[str, Any]) -> None:
    # What `ray up` does before its first call to the cloud: defaults filled in, then checked.
    validate_config(prepare_config(cluster))


def test_rays_own_validation_rejects_an_unknown_head(cluster: dict[str, Any]) -> None:
    cluster["head_node_type"] = "no_such_type"
    with pytest.raises(ValueError, match="head_node_type"):
        validate_config(prepare_config(cluster))


def test_head_runs_no_work(cluster: dict[str, Any]) -> None:
    assert cluster["head_node_type"] in cluster["available_node_types"]
    head = cluster["available_node_types"][cluster["head_node_type"]]
    assert head["resources"]["CPU"] == 0
    assert not ACCELERATORS & head["resources"].keys()
    assert head.get("max_workers", 0) == 0
    assert "InstanceMarketOptions" not in head["node_config"], "the head must not be spot"


def test_there_are_gpu_and_cpu_workers(cluster: dict[str, Any]) -> None:
    resources = [node["resources"] for node in workers(cluster).values()]
    assert any(r.get("GPU", 0) >= 1 for r in resources)
    assert any(r.get("CPU", 0) >= 1 and not ACCELERATORS & r.keys() for r in resources)


def test_worker_limits_fit_together(cluster: dict[str, Any]) -> None:
    types = cluster["available_node_types"].values()
    assert sum(node.get("min_workers", 0) for node in types) <= cluster["max_workers"]
    for name, node in workers(cluster).items():
        assert node["min_workers"] == 0, f"{name} must cost nothing while no job runs"
        assert 1 <= node["max_workers"] <= cluster["max_workers"], name


def test_setup_lists_of_a_type_repeat_the_common_commands(cluster: dict[str, Any]) -> None:
    # Ray takes a type's own list instead of the common one, not after it.
    common = cluster["setup_commands"]
    project = cluster["head_setup_commands"][-1]
    for name, node in workers(cluster).items():
        commands = node["worker_setup_commands"]
        assert commands[: len(common)] == common, name
        assert commands[-1] == project, name


def test_every_type_installs_the_torch_build_it_can_use(cluster: dict[str, Any]) -> None:
    lists = {name: node["worker_setup_commands"] for name, node in workers(cluster).items()}
    lists[cluster["head_node_type"]] = cluster["head_setup_commands"]
    for name, commands in lists.items():
        (torch,) = (command for command in commands if " torch==" in command)
        has_gpu = "GPU" in cluster["available_node_types"][name]["resources"]
        assert ("/whl/cu" in torch and "/whl/cpu" not in torch) == has_gpu, name


def test_ray_on_the_nodes_is_the_ray_these_checks_ran_with(cluster: dict[str, Any]) -> None:
    project = cluster["head_setup_commands"][-1]
    series = ".".join(ray.__version__.split(".")[:2])
    assert f'"ray[data,default]=={series}.' in project


def test_start_commands_keep_what_ray_needs(cluster: dict[str, Any]) -> None:
    head = "; ".join(cluster["head_start_ray_commands"])
    worker = "; ".join(cluster["worker_start_ray_commands"])
    for needed in ("--head", "--port=6379", "--autoscaling-config=~/ray_bootstrap_config.yaml"):
        assert needed in head
    assert "--dashboard-host=127.0.0.1" in head
    assert "--address=$RAY_HEAD_IP:6379" in worker
    for commands in (head, worker):
        assert commands.startswith("ray stop")
        assert "--object-manager-port=8076" in commands
        assert "--object-spilling-directory=" in commands
