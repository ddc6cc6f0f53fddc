"""examples/clusters, against Ray's schema and checks, KubeRay's fields, and our own command line."""

import copy
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import start as ray_start

from jobs.cli import parse_run
from pipeline.cluster import ClusterConfig
from quant.convert import num_bytes
from quant.store import STORE_SHARE
from tests.shapes import LLAMA_8B

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "clusters"
SCHEMA = json.loads((Path(ray.__file__).parent / "autoscaler/ray-schema.json").read_text())
LOCAL = ("on-prem.yaml", "ascend-npu.yaml")
# What ray.io/v1 has (KubeRay's rayjob_types.go and raycluster_types.go), as far as it is of use here.
KNOWN = {
    "spec": {
        *("submissionMode", "entrypoint", "runtimeEnvYAML", "backoffLimit", "jobId", "metadata"),
        *("activeDeadlineSeconds", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished"),
        *(
            "rayClusterSpec",
            "clusterSelector",
            "submitterPodTemplate",
            "submitterConfig",
            "suspend",
        ),
        *("entrypointNumCpus", "entrypointNumGpus", "entrypointResources", "managedBy"),
    },
    "rayClusterSpec": {
        *("rayVersion", "authOptions", "enableInTreeAutoscaling", "autoscalerOptions"),
        *("headGroupSpec", "workerGroupSpecs", "suspend", "headServiceAnnotations"),
    },
    "autoscalerOptions": {"idleTimeoutSeconds", "upscalingMode", "resources", "image", "env"},
    "headGroupSpec": {"rayStartParams", "template", "serviceType", "enableIngress", "headService"},
    "workerGroup": {
        *("groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams"),
        *("template", "scaleStrategy"),
    },
    "pod": {
        *("containers", "volumes", "tolerations", "nodeSelector", "restartPolicy"),
        "serviceAccountName",
    },
    "container": {
        *("name", "image", "env", "envFrom", "resources", "volumeMounts", "ports", "lifecycle"),
        "imagePullPolicy",
    },
}
GI = 2**30


def text_of(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def load(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load(text_of(name))
    assert isinstance(loaded, dict)
    return loaded


def commands_of(cluster: dict[str, Any]) -> str:
    """Every command of a launcher file, in one text."""
    lists = [value for key, value in cluster.items() if key.endswith("_commands")]
    types = cluster.get("available_node_types", {}).values()
    lists += [value for node in types for key, value in node.items() if key.endswith("_commands")]
    return "\n".join(command for commands in lists for command in commands)


def start_flags() -> set[str]:
    """What `ray start` of the installed Ray takes."""
    return {flag for parameter in ray_start.params for flag in parameter.opts}


def test_every_file_is_tested() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*LOCAL, "kuberay-rayjob.yaml"}


@pytest.mark.parametrize("name", LOCAL)
def test_local_files_are_valid_for_rays_schema_and_its_own_checks(name: str) -> None:
    cluster = load(name)
    jsonschema.validate(cluster, SCHEMA)
    prepared = prepare_config(copy.deepcopy(cluster))
    validate_config(prepared)
    (node,) = prepared["available_node_types"].values()
    assert node["min_workers"] == node["max_workers"] == len(cluster["provider"]["worker_ips"])


@pytest.mark.parametrize("name", LOCAL)
def test_rays_checks_refuse_what_local_files_must_not_have(name: str) -> None:
    cluster = load(name)
    broken = cluster | {"available_node_types": {"gpu": {"node_config": {}, "resources": {}}}}
    with pytest.raises(Exception, match="not supported for on-premise"):
        prepare_config(broken)
    del cluster["provider"]["head_ip"]
    with pytest.raises(Exception, match="head_ip"):
        prepare_config(cluster)


@pytest.mark.parametrize("name", [*LOCAL, "../../cluster.yaml"])
def test_start_commands_use_flags_that_ray_has(name: str) -> None:
    cluster = load(name)
    head, worker = ("; ".join(cluster[f"{kind}_start_ray_commands"]) for kind in ("head", "worker"))
    for commands in (head, worker):
        (flags,) = re.findall(r"ray start ([^;]*)", commands)
        assert {flag.partition("=")[0] for flag in shlex.split(flags)} <= start_flags()
        assert commands.startswith("ray stop")
        assert "--object-manager-port=8076" in flags
        assert "--object-spilling-directory=" in flags
    assert "--address=$RAY_HEAD_IP:6379" in worker
    assert "unset OMP_NUM_THREADS" in worker
    for needed in ("--head", "--port=6379", "--autoscaling-config=~/ray_bootstrap_config.yaml"):
        assert needed in head
    assert "--dashboard-host=127.0.0.1" in head


@pytest.mark.parametrize("name", LOCAL)
def test_the_head_of_a_local_cluster_runs_no_work(name: str) -> None:
    head = "; ".join(load(name)["head_start_ray_commands"])
    assert "--num-cpus=0" in head
    assert "--num-gpus=0" in head
    assert name != "ascend-npu.yaml" or "export ASCEND_RT_VISIBLE_DEVICES=;" in head


@pytest.mark.parametrize("name", LOCAL)
def test_pins_are_those_of_the_aws_file(name: str) -> None:
    aws, local = (commands_of(cluster) for cluster in (load("../../cluster.yaml"), load(name)))
    pins = [r"torch==[\d.]+", r"ray\[data,default\]==[\d.]+", r"uv/[\d.]+", r"--python 3[\d.]+"]
    for pin in pins:
        (expected,) = set(re.findall(rf"(?<!\w){pin}", aws))
        assert set(re.findall(rf"(?<!\w){pin}", local)) == {expected}
    assert f"=={ray.__version__.rpartition('.')[0]}." in local
    builds = set(re.findall(r"whl/(cu\d+)", aws))
    assert name != "on-prem.yaml" or builds == set(re.findall(r"build=(cu\d+)", local))


def test_torch_npu_has_the_version_of_torch() -> None:
    commands = commands_of(load("ascend-npu.yaml"))
    (torch,) = re.findall(r"\btorch==([\d.]+)", commands)
    assert re.findall(r"\btorch_npu==([\d.]+)", commands) == [torch]


@pytest.mark.parametrize("name", LOCAL)
def test_commands_are_shell(name: str) -> None:
    for command in commands_of(load(name)).splitlines():
        subprocess.run(["bash", "-n", "-c", command], check=True)


def test_the_mixed_pool_that_the_npu_file_shows_has_our_keys() -> None:
    comment = text_of("ascend-npu.yaml").partition("#   cluster:\n")[2].partition("\n\n")[0]
    workers = yaml.safe_load(re.sub(r"^#", "", comment, flags=re.MULTILINE))["workers"]
    assert [worker["device"] for worker in workers] == ["npu", "cpu"]
    for worker in workers:
        assert worker.keys() == {"device", "num_workers", "num_cpus"}
    ClusterConfig.model_validate({"workers": workers})


# --- KubeRay ------------------------------------------------------------------------------


@pytest.fixture
def rayjob() -> dict[str, Any]:
    return load("kuberay-rayjob.yaml")


def groups(rayjob: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The head's group and those of the workers, by name."""
    cluster = rayjob["spec"]["rayClusterSpec"]
    return {"head": cluster["headGroupSpec"]} | {
        group["groupName"]: group for group in cluster["workerGroupSpecs"]
    }


def container_of(group: dict[str, Any]) -> dict[str, Any]:
    (container,) = group["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def bytes_of(quantity: str) -> int:
    assert quantity.endswith("Gi")
    return int(quantity.removesuffix("Gi")) * GI


def config_of(rayjob: dict[str, Any]) -> Any:
    words = shlex.split(rayjob["spec"]["entrypoint"])
    assert words[:4] == ["python", "-m", "jobs", "generate"]
    return parse_run(words[4:])


def unknown_fields(rayjob: dict[str, Any]) -> set[str]:
    """Fields that KubeRay, or Kubernetes, would not know."""
    spec, cluster = rayjob["spec"], rayjob["spec"]["rayClusterSpec"]
    found = set(rayjob) - {"apiVersion", "kind", "metadata", "spec"}
    found |= set(spec) - KNOWN["spec"]
    found |= set(cluster) - KNOWN["rayClusterSpec"]
    found |= set(cluster["autoscalerOptions"]) - KNOWN["autoscalerOptions"]
    for name, group in groups(rayjob).items():
        pod = group["template"]["spec"]
        found |= set(group) - KNOWN["headGroupSpec" if name == "head" else "workerGroup"]
        found |= set(group["template"]) - {"metadata", "spec"}
        found |= set(pod) - KNOWN["pod"]
        found |= {key for container in pod["containers"] for key in container} - KNOWN["container"]
    return found


def test_the_rayjob_has_known_fields_only(rayjob: dict[str, Any]) -> None:
    assert (rayjob["apiVersion"], rayjob["kind"]) == ("ray.io/v1", "RayJob")
    assert unknown_fields(rayjob) == set()
    rayjob["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["maxReplica"] = 1
    rayjob["spec"]["backOffLimit"] = 1
    assert unknown_fields(rayjob) == {"maxReplica", "backOffLimit"}


def test_choices_that_cost_are_explained() -> None:
    text = text_of("kuberay-rayjob.yaml")
    for field in (
        *("submissionMode", "backoffLimit", "activeDeadlineSeconds", "shutdownAfterJobFinishes"),
        *("ttlSecondsAfterFinished", "idleTimeoutSeconds", "num-cpus", "object-store-memory"),
        *("entrypoint", "runtimeEnvYAML", "replicas", "resources", "- name: shm", "authOptions"),
    ):
        before = text.partition(f" {field}:")[0] if ":" not in field else text.partition(field)[0]
        assert before != text, field
        assert before.rstrip().splitlines()[-1].lstrip().startswith("#"), field


def test_our_own_parser_takes_the_entrypoint(rayjob: dict[str, Any]) -> None:
    config = config_of(rayjob)
    assert config.cluster.device == "cuda"
    assert config.output.startswith("s3://")
    assert all(uri.startswith("s3://") for uri in config.input)
    mounted = {m["mountPath"] for m in container_of(groups(rayjob)["gpu"])["volumeMounts"]}
    assert any(config.model.startswith(f"{path}/") for path in mounted)
    environment = yaml.safe_load(rayjob["spec"]["runtimeEnvYAML"])
    assert environment.keys() <= {"env_vars", "working_dir", "pip"}
    assert all(isinstance(value, str) for value in environment["env_vars"].values())


def test_every_worker_of_the_job_finds_a_gpu_and_the_cpus_when_it_starts(
    rayjob: dict[str, Any],
) -> None:
    cluster, gpu = config_of(rayjob).cluster, groups(rayjob)["gpu"]
    limits = container_of(gpu)["resources"]["limits"]
    assert gpu["replicas"] == gpu["minReplicas"] == cluster.num_workers <= gpu["maxReplicas"]
    assert int(limits["nvidia.com/gpu"]) == 1
    assert cluster.num_cpus_per_worker < int(limits["cpu"])


def test_the_head_of_the_rayjob_runs_no_work(rayjob: dict[str, Any]) -> None:
    head = groups(rayjob)["head"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert "nvidia.com/gpu" not in container_of(head)["resources"]["limits"]


def test_cpu_pods_cost_nothing_while_they_are_not_asked_for(rayjob: dict[str, Any]) -> None:
    cpu = groups(rayjob)["cpu"]
    assert cpu["replicas"] == cpu["minReplicas"] == 0 < cpu["maxReplicas"]
    assert "nvidia.com/gpu" not in container_of(cpu)["resources"]["limits"]


@pytest.mark.parametrize("name", ["head", "gpu", "cpu"])
def test_the_store_fits_the_memory_and_holds_the_weights(rayjob: dict[str, Any], name: str) -> None:
    group = groups(rayjob)[name]
    parameters, container = group["rayStartParams"], container_of(group)
    assert {f"--{key}" for key in parameters} <= start_flags()
    assert all(isinstance(value, str) for value in parameters.values()), "KubeRay wants strings"
    volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    shm = bytes_of(volumes["shm"]["emptyDir"]["sizeLimit"])
    store, resources = int(parameters["object-store-memory"]), container["resources"]
    assert store <= 0.95 * shm < shm < bytes_of(resources["limits"]["memory"])
    assert resources["requests"] == resources["limits"]
    if name != "head":  # Which runs no work.
        assert num_bytes(LLAMA_8B, config_of(rayjob).quant) <= STORE_SHARE * store


def test_pins_of_the_rayjob_are_those_of_the_aws_file(rayjob: dict[str, Any]) -> None:
    aws, text = commands_of(load("../../cluster.yaml")), text_of("kuberay-rayjob.yaml")
    (version,) = set(re.findall(r"ray\[data,default\]==([\d.]+)", aws))
    assert set(re.findall(r"ray\[data,default\]==([\d.]+)", text)) == {version}
    assert f"FROM rayproject/ray:{version}-py311" in text
    assert rayjob["spec"]["rayClusterSpec"]["rayVersion"] == version
    images = {container_of(group)["image"] for group in groups(rayjob).values()}
    assert images == {f"REGISTRY/quasar-batch:ray-{version}"}
    assert set(re.findall(r"torch==[\d.]+", text)) == set(re.findall(r"torch==[\d.]+", aws))
    assert set(re.findall(r"whl/(cu\d+)", text)) == set(re.findall(r"whl/(cu\d+)", aws))


def test_a_rayjob_ends_and_takes_its_cluster_with_it(rayjob: dict[str, Any]) -> None:
    spec = rayjob["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert 0 < spec["ttlSecondsAfterFinished"] <= 3600
    assert spec["activeDeadlineSeconds"] > 0
    assert "jobId" not in spec, "a second submission would be refused"
    assert not spec.keys() & {"entrypointNumGpus", "entrypointNumCpus"}, "the driver needs none"
