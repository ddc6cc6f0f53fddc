"""The part of a run's configuration that says on what it runs; no token depends on it."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from workers.config import Device


class WorkersConfig(BaseModel):
    """Workers that are alike: a pool."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Device = Field(
        "cpu",
        description="What they run on; cuda takes a GPU each, npu the resource NPU (neither was tried "
        "on one yet).",
    )
    num_workers: int = Field(1, ge=1, description="The most of them.")
    min_workers: int | None = Field(
        None,
        ge=1,
        description="Those that there are from the beginning to the end; others come while shards "
        "wait, and go when none is left for them. None: num_workers.",
    )
    num_cpus: int | None = Field(
        None, ge=1, description="Threads of each; None: an even share of the CPUs that are left."
    )
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {}, description="Other resources of Ray that each takes, by their names."
    )

    @model_validator(mode="after")
    def _check_sizes(self) -> "WorkersConfig":
        if self.least > self.num_workers:
            raise ValueError(f"min_workers {self.least} exceeds num_workers {self.num_workers}")
        if known := {"CPU", "GPU", "memory", "object_store_memory"} & self.resources.keys():
            raise ValueError(f"resources: {min(known)} follows from device and num_cpus")
        return self

    @property
    def least(self) -> int:
        """How many there are to be at least."""
        return self.min_workers or self.num_workers


class ClusterConfig(BaseModel):
    """How many workers, and what each may use."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_workers: int = Field(1, ge=1, description="Actors, each with an engine of its own.")
    num_cpus_per_worker: int | None = Field(
        None, ge=1, description="Threads of a worker; None: an even share of the cluster's CPUs."
    )
    device: Device = Field("cpu", description="What a worker runs on: see `workers`.")
    workers: tuple[WorkersConfig, ...] = Field(
        (),
        description="Pools of workers, instead of the three keys above, where they are not all alike: "
        "[{device: cuda, num_workers: 4}, {device: cpu, num_workers: 8, num_cpus: 4}].",
    )
    weights: Literal["object_store", "file"] = Field(
        "object_store",
        description="Where a node's workers share the weights: in Ray's object store, or in files under "
        "the cache folder, if the store cannot hold them.",
    )
    shards_per_worker: int = Field(
        4, ge=1, description="Shards a worker holds at once, so that its batch never runs dry."
    )
    max_restarts: int = Field(
        20, ge=0, description="Times a worker whose process died is started again."
    )
    max_attempts_per_row: int = Field(
        3,
        ge=1,
        description="Workers that may die with a row before it is given up; it takes three to find it.",
    )

    @model_validator(mode="after")
    def _check_pools(self) -> "ClusterConfig":
        named = {"num_workers": 1, "num_cpus_per_worker": None, "device": "cpu"}
        given = [name for name, default in named.items() if getattr(self, name) != default]
        if self.workers and given:
            raise ValueError(f"{given[0]} and workers say the same: give one of them")
        return self

    @property
    def pools(self) -> tuple[WorkersConfig, ...]:
        """The pools, one where nothing else is said."""
        one = WorkersConfig(
            device=self.device, num_workers=self.num_workers, num_cpus=self.num_cpus_per_worker
        )
        return self.workers or (one,)
