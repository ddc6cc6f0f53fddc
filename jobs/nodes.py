"""The cluster's nodes before anything runs on them: what they have, and whether they see the files."""

import os
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private import state
from ray._private.services import canonicalize_bootstrap_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from jobs.cli import say
from pipeline import storage
from pipeline.cluster import WorkersConfig
from pipeline.config import RunConfig
from pipeline.errors import InputError
from pipeline.places import Kind, room_on
from quant.store import working_nodes

_SECONDS = 50.0  # For all nodes to say what they see.
_REACH_SECONDS = 20.0  # For a head to answer.


def check_address() -> None:
    """Try whether the Ray that is to be joined answers: by itself, joining is tried for ever.

    Raises:
        InputError: it does not, or it cannot be joined like that.
    """
    named = os.environ.get("RAY_ADDRESS", "")
    if named.startswith("ray://"):
        raise InputError(
            f"RAY_ADDRESS {named}: Ray's client cannot run this; use `python -m jobs submit`, with the "
            "address of the job server (http://HEAD:8265)"
        )
    try:
        address = canonicalize_bootstrap_address(None)  # type: ignore[arg-type]
    except (ValueError, OSError) as error:
        raise InputError(f"RAY_ADDRESS {named}: is no address HOST:PORT ({error})") from error
    if address is None:
        return
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _REACH_SECONDS
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                whose = f"RAY_ADDRESS {named}" if named else f"Ray at {address}, of `ray start`"
                remedy = "set RAY_ADDRESS=local to have one for this run only"
                raise InputError(
                    f"{whose}: nothing answers ({error}); start it, or {remedy}"
                    + ("" if named else "; `ray stop` forgets the old one")
                ) from error
        time.sleep(1)


@dataclass(frozen=True)
class _Capacity:
    """What a cluster has, or can start: resources of each node or type of node, and of all together."""

    nodes: list[tuple[str, dict[str, float]]]
    total: dict[str, float]

    @classmethod
    def of_cluster(cls) -> "_Capacity":
        alive = [node for node in ray.nodes() if node["Alive"]]
        nodes = [(node["NodeManagerHostname"], dict(node["Resources"])) for node in alive]
        total: dict[str, float] = defaultdict(float)
        for node in alive:
            for name, amount in node["Resources"].items():
                total[name] += amount
        config = state.state.get_cluster_config()  # The autoscaler's, where there is one.
        if config is not None:
            most = state.state.get_max_resources_from_cluster_config() or {}
            total |= {name: max(total.get(name, 0), amount) for name, amount in most.items()}
            for group in config.node_group_configs:
                nodes.append((f"a node of type {group.name}", dict(group.resources)))
        return cls(nodes, total)

    def __str__(self) -> str:
        shown = (f"{name} with {_describe(resources)}" for name, resources in self.nodes)
        return "; ".join(dict.fromkeys(shown))


def choose_kinds(pools: Sequence[WorkersConfig]) -> list[Kind]:
    """The pools with the threads of their workers: those that are not told an even share of what is left.

    Raises:
        InputError: the cluster has no room for the workers that there are to be at least.
    """
    capacity = _Capacity.of_cluster()
    cpus = int(capacity.total.get("CPU", 0))
    largest = max(int(resources.get("CPU", 0)) for _, resources in capacity.nodes)
    told = sum(pool.num_workers * (pool.num_cpus or 0) for pool in pools)
    others = sum(pool.num_workers for pool in pools if not pool.num_cpus)
    share = max(1, min((cpus - told) // max(others, 1), largest))
    kinds = [Kind(pool, pool.num_cpus or share) for pool in pools]
    _check_room(kinds, capacity)
    return kinds


def _check_room(kinds: Sequence[Kind], capacity: _Capacity) -> None:
    wanted: dict[str, float] = defaultdict(float)
    for kind in kinds:
        if not any(room_on(resources, kind.needs) for _, resources in capacity.nodes):
            raise InputError(
                f"cluster: no node has room for a {kind.config.device} worker ({kind}); there are: "
                f"{capacity}"
            )
        for name, amount in kind.needs.items():
            wanted[name] += kind.config.least * amount
    for name, amount in wanted.items():
        found = capacity.total.get(name, 0)
        if amount > found and name != "CPU":  # Workers share CPUs, if need be one after another.
            raise InputError(
                f"cluster: the workers need {amount:g} {name}, and Ray knows of {found:g}; ask for fewer "
                "of them, or start more nodes"
            )


def _describe(resources: Mapping[str, float]) -> str:
    shown = [
        f"{amount:g} {name}"
        for name, amount in sorted(resources.items())
        if name not in ("memory", "object_store_memory") and not name.startswith("node:")
    ]
    return ", ".join(shown) or "nothing to work with"


def check_paths(config: RunConfig, model: Path, sources: Sequence[str]) -> None:
    """Let every node that may get work look at the files of the job.

    Raises:
        InputError: a node does not see the output, the model or an input as this process does.
    """
    here = ray.get_runtime_context().get_node_id()
    others = [node for node in working_nodes() if node["NodeID"] != here]
    local = [uri for uri in sources if storage.is_local(uri)]
    paths = {"model": str(model)} | ({"input": local[0]} if local else {})
    if not others:
        return
    if storage.is_relative(config.output):
        raise InputError(
            f"output {config.output}: is relative, and the cluster has several nodes; give an absolute "
            "path that all of them see, or a URI"
        )
    mark = storage.join(config.output, f".seen-{uuid.uuid4().hex}")
    if storage.is_local(config.output):
        storage.write_atomic(mark, b"")
        paths["output"] = mark
    try:
        looks = {_look_from(node, paths): node for node in others}
        ended, silent = ray.wait(list(looks), num_returns=len(looks), timeout=_SECONDS)
        for look in silent:
            node = looks[look]["NodeManagerHostname"]
            say(f"node {node}: has not said within {_SECONDS:g} s whether it sees the files")
        for look in ended:
            if unseen := ray.get(look):
                what, where = unseen[0], looks[look]["NodeManagerHostname"]
                path = config.output if what == "output" else paths[what]
                raise InputError(
                    f"{what} {path}: cannot be seen from node {where}; put it where every node sees it "
                    "(object storage, or a file system that all of them mount)"
                )
    finally:
        if "output" in paths:
            storage.remove(mark)


def _look_from(node: dict[str, Any], paths: dict[str, str]) -> "ray.ObjectRef[list[str]]":
    there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return _look.options(scheduling_strategy=there).remote(paths)


@ray.remote(num_cpus=0, max_retries=0)
def _look(paths: dict[str, str]) -> list[str]:
    """What of the paths is not there."""
    return [what for what, path in paths.items() if not storage.local_path(path).exists()]
