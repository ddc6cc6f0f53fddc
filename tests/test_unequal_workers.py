"""Workers of several kinds, on nodes with made-up resources; what nodes must have, and must see."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import jobs.generate
from jobs import nodes
from jobs.__main__ import main
from pipeline.cluster import ClusterConfig
from pipeline.errors import InputError
from tests.conftest import ROOT, clean_environment, run_jobs
from tests.runs import read_rows, tokens_of
from tests.test_nodes import NODE, cluster

__all__ = ["cluster"]  # The fixture.

pytestmark = pytest.mark.ray


def in_cluster(cluster: Any, code: str) -> Any:
    """What a driver in the cluster prints, as JSON."""
    result = subprocess.run(
        [sys.executable, "-c", f"import ray\nray.init(logging_level='ERROR')\n{code}"],
        cwd=ROOT,
        env=clean_environment(RAY_ADDRESS=cluster.address),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_two_kinds_of_workers_answer_as_one(
    cluster: Any, flags: tuple[Any, ...], undisturbed: Path, tmp_path: Path
) -> None:
    """Each kind has its node; both do some of the shards, and the device column tells which."""
    for name in ("quick", "slow"):
        cluster.add_node(**NODE, resources={name: 1})
    kinds = [
        {"resources": {"quick": 1}, "num_cpus": 2},
        {"resources": {"slow": 1}, "num_cpus": 1},
    ]
    output = tmp_path / "out"
    given = ("--recipe", "rtn", "--cluster.shards_per_worker", 1, "--max-num-seqs", 2)
    result = run_jobs(
        *("generate", *flags, "--output", output, *given),
        *("--cluster.workers", json.dumps(kinds)),
        RAY_ADDRESS=cluster.address,
    )
    assert result.returncode == 0, result.stderr
    assert tokens_of(read_rows(output)) == tokens_of(read_rows(undisturbed))
    assert main(["verify", str(output)]) == 0
    summary = json.loads((output / "summary.json").read_text())
    assert summary["this_run"]["agreement_of_workers"] == {
        "kinds": ["cpu (2 CPU, 1 quick)", "cpu (1 CPU, 1 slow)"],
        "num_prompts": 3,
        "num_equal": 3,
    }


_SHARED = """
import json, os
from pathlib import Path
import numpy as np
from quant.checkpoint import open_checkpoint
from quant.config import QuantConfig
from quant.store import convert_to_store

weights = convert_to_store(open_checkpoint(Path({model!r})), QuantConfig(recipe="rtn"))
sent = weights.send()
ray.get(sent)

@ray.remote(num_cpus=0.5)
class Attached:
    def __init__(self, weights):
        self.pieces = weights[0].attach()

    def where(self):
        array = max((a for piece in self.pieces for a in piece.values()), key=lambda a: a.nbytes)
        at = array.__array_interface__["data"][0]
        for line in Path("/proc/self/maps").read_text().splitlines():
            bounds, _, offset, device, inode = line.split()[:5]
            first, last = (int(x, 16) for x in bounds.split("-"))
            if first <= at < last:
                node = ray.get_runtime_context().get_node_id()
                return node, device, inode, int(offset, 16) + at - first

there = {{"resources": {{"there": 0.5}}}}
actors = [Attached.options(**there).remote([weights]) for _ in range(2)]
places = ray.get([actor.where.remote() for actor in actors])
print(json.dumps([len(sent), places[0] == places[1], places[0][2] != "0"]))
"""


def test_a_node_has_the_weights_once(
    request: pytest.FixtureRequest, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are sent to both nodes; two actors of one node map the same bytes of the same memory."""
    monkeypatch.setenv(
        "RAY_max_direct_call_object_size", "1"
    )  # Small ones go to the store as well.
    cluster = request.getfixturevalue("cluster")
    cluster.add_node(**NODE)
    cluster.add_node(**NODE, resources={"there": 1})
    code = _SHARED.format(model=str(tiny_checkpoint))
    assert in_cluster(cluster, code) == [2, True, True]


_CHECKED = """
import json
import re
from pathlib import Path
import jobs.generate
from jobs import nodes
from pipeline.config import RunConfig
from pipeline.errors import InputError

def check(output, model, uris):
    config = RunConfig(model=model, input=uris, output=output)
    try:
        nodes.check_paths(config, Path(model), uris)
    except InputError as error:
        return str(error)
    return ""

here = {here!r}
told = [check(f"{{here}}/out", here, ["s3://b/x"]), check("s3://b/out", f"{{here}}/no", ["s3://b/x"])]
told.append(check(f"{{here}}/out", here, [f"{{here}}/no.jsonl"]))
told.append(check("out", here, ["s3://b/x"]))
nodes.storage.write_atomic = lambda *_: None  # As if the nodes had disks of their own.
told.append(check(f"{{here}}/out", here, ["s3://b/x"]))
print(json.dumps(told))
"""


def test_what_nodes_do_not_see_is_told(cluster: Any, tmp_path: Path) -> None:
    for _ in range(2):
        cluster.add_node(**NODE)
    fine, model, source, relative, output = in_cluster(cluster, _CHECKED.format(here=str(tmp_path)))
    assert fine == ""
    assert f"model {tmp_path}/no: cannot be seen from node" in model
    assert f"input {tmp_path}/no.jsonl: cannot be seen from node" in source
    assert relative.startswith("output out: is relative, and the cluster has several nodes")
    assert f"output {tmp_path}/out: cannot be seen from node" in output
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("workers", "told"),
    [
        ([{"device": "cuda"}], "no node has room for a cuda worker (3 CPU, 1 GPU)"),
        ([{"device": "npu", "num_cpus": 1}], "no node has room for a npu worker (1 CPU, 1 NPU)"),
        ([{"num_cpus": 500}], "no node has room for a cpu worker (500 CPU)"),
        ([{"resources": {"rack": 1}, "num_cpus": 1}], "(1 CPU, 1 rack)"),
    ],
)
def test_a_cluster_without_what_is_asked_for(
    generate: Any,
    flags: tuple[Any, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    workers: list[dict[str, Any]],
    told: str,
) -> None:
    given = ("--cluster.workers", json.dumps(workers), "--output", tmp_path / "out")
    assert generate(*flags, *given) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "there are:" in error


def test_nodes_that_can_be_started_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """An autoscaler with a head that works on nothing, up to four GPU nodes and up to two CPU nodes."""
    groups = [
        SimpleNamespace(name="gpu", resources={"CPU": 8, "GPU": 1}),
        SimpleNamespace(name="cpu", resources={"CPU": 16}),
    ]
    head = {"Alive": True, "NodeManagerHostname": "head", "Resources": {"memory": 1e9}}
    monkeypatch.setattr("ray.nodes", lambda: [head])
    for name, value in (
        ("get_cluster_config", SimpleNamespace(node_group_configs=groups)),
        ("get_max_resources_from_cluster_config", {"CPU": 64, "GPU": 4}),
    ):
        monkeypatch.setattr(nodes.state.state, name, lambda value=value: value)

    def threads(*pools: dict[str, Any]) -> list[int]:
        config = ClusterConfig(workers=pools)  # type: ignore[arg-type]
        return [kind.num_threads for kind in nodes.choose_kinds(config.pools)]

    assert threads({"num_workers": 4}) == [16]
    assert threads({"device": "cuda", "num_workers": 4}, {"num_workers": 8, "num_cpus": 4}) == [
        8,
        4,
    ]
    with pytest.raises(InputError, match="the workers need 5 GPU, and Ray knows of 4"):
        threads({"device": "cuda", "num_workers": 5, "num_cpus": 8})
    with pytest.raises(
        InputError, match=r"head with nothing to work with; a node of type gpu with 8"
    ):
        threads({"device": "npu"})


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("127.0.0.1:1", "RAY_ADDRESS 127.0.0.1:1: nothing answers"),
        ("ray://127.0.0.1:10001", "Ray's client cannot run this"),
        ("nonsense", "is no address HOST:PORT"),
    ],
)
def test_a_head_that_does_not_answer(
    address: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(nodes, "_REACH_SECONDS", 0.0)
    with pytest.raises(InputError, match=re.escape(told)):
        nodes.check_address()


def test_a_head_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray start` leaves its address behind when its processes are killed."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(nodes, "_REACH_SECONDS", 0.0)
    with pytest.raises(InputError, match=r"Ray at [\d.]+:1, of `ray start`: nothing answers"):
        nodes.check_address()


def test_a_head_that_answers(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    nodes.check_address()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("Version mismatch: 2.1 here, 2.2 there"), "install the cluster's versions"),
        (ConnectionError("no"), "Ray cannot be joined: no"),
    ],
)
def test_a_head_that_cannot_be_joined(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: Any) -> None:
        raise error

    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(jobs.generate.ray, "init", fail)
    with pytest.raises(InputError, match=told):
        jobs.generate.start_ray()
