"""Nodes taken out of a real cluster of several, on this machine, while a run works on them."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.__main__ import main
from tests.conftest import clean_environment
from tests.runs import parts_of, read_rows, tokens_of
from tests.test_faults import drive

pytestmark = pytest.mark.ray

NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
# A worker takes a node for itself, and is slow enough to be caught at work.
ONE_A_NODE = ("--cluster.num_cpus_per_worker", 2, "--max-num-seqs", 1, "--proposer", "none")


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head that works on nothing; nodes are the tests' affair."""
    from ray.cluster_utils import Cluster

    head = NODE | {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, connect=False, head_node_args=head)
    yield cluster
    cluster.shutdown()


def wait_for_parts(driver: subprocess.Popen[str], output: Path) -> None:
    deadline = time.monotonic() + 120
    while not parts_of(output) and time.monotonic() < deadline and driver.poll() is None:
        time.sleep(0.02)


def finish(driver: subprocess.Popen[str], output: Path, undisturbed: Path) -> None:
    _, err = driver.communicate(timeout=180)
    assert driver.returncode == 0, err
    assert "Traceback" not in err
    assert tokens_of(read_rows(output)) == tokens_of(read_rows(undisturbed))
    assert main(["verify", str(output)]) == 0


def test_a_node_is_replaced_that_had_the_only_weights(
    cluster: Any, flags: tuple[Any, ...], undisturbed: Path, tmp_path: Path
) -> None:
    """The worker, the conversion and its result were all there."""
    node, output = cluster.add_node(**NODE), tmp_path / "out"
    environment = clean_environment(RAY_ADDRESS=cluster.address)
    driver = drive(environment, *flags, "--output", output, *ONE_A_NODE)
    wait_for_parts(driver, output)
    cluster.remove_node(node, allow_graceful=False)
    assert 0 < len(parts_of(output)) < len(parts_of(undisturbed)), driver.poll()
    cluster.add_node(**NODE)
    finish(driver, output, undisturbed)


@pytest.mark.parametrize("lost", [0, 1])
def test_the_nodes_that_are_left_do_the_work(
    cluster: Any, flags: tuple[Any, ...], undisturbed: Path, tmp_path: Path, lost: int
) -> None:
    """One of the two had the weights first. There is never another node."""
    nodes, output = [cluster.add_node(**NODE) for _ in range(2)], tmp_path / "out"
    environment = clean_environment(RAY_ADDRESS=cluster.address)
    driver = drive(environment, *flags, "--output", output, *ONE_A_NODE, "--num-workers", 2)
    wait_for_parts(driver, output)
    cluster.remove_node(nodes[lost], allow_graceful=False)
    assert 0 < len(parts_of(output)) < len(parts_of(undisturbed)), driver.poll()
    finish(driver, output, undisturbed)
