"""`KubernetesSettings`: names and limits of a Kubernetes site, for JobSet and for Kubeflow Trainer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from weft.launch.places.site import (
    AbsolutePath,
    Key,
    Label,
    Line,
    Name,
    OptionalKey,
    OptionalName,
    Quantity,
    SiteSection,
)

OWN_VOLUMES = {"shm", "documents"}


class Volume(SiteSection):
    """A persistent volume claim."""

    claim: Name = Field(description="name of the PersistentVolumeClaim")
    path: AbsolutePath = Field(description="where ranks see it")
    read_only: bool = Field(default=False, description="mounted read-only")


class Toleration(SiteSection):
    key: Key = Field(description="key of the taint")
    value: Line = Field(default="", description="its value; left out: any")
    effect: Literal["any", "NoSchedule", "PreferNoSchedule", "NoExecute"] = Field(
        default="any", description="of the taint"
    )


class KubernetesSettings(SiteSection):
    kind: Literal["jobset", "trainjob"] = Field(default="jobset", description="jobset | trainjob (Kubeflow Trainer v2)")
    namespace: Name = Field(default="default", description="namespace of all objects")
    image: Line = Field(default="", description="container image with weft")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(default="IfNotPresent", description="of the image")
    pull_secret: OptionalName = Field(default="", description="secret of the image's registry")
    gpu_resource: Key = Field(default="nvidia.com/gpu", description="resource name of a GPU")
    rdma_resource: Key = Field(default="rdma/hca", description="resource name of RDMA devices at this site")
    rdma_per_node: int = Field(default=0, ge=0, description="RDMA devices of a node; ranks then may lock memory")
    networks: Line = Field(default="", description="Multus networks, comma-separated: k8s.v1.cni.cncf.io/networks")
    cpus_per_rank: int = Field(default=4, ge=1, description="cores of a rank")
    memory_per_rank: Quantity = Field(default="32Gi", description="memory of a rank")
    shm: Quantity = Field(default="16Gi", description="size of /dev/shm, in memory")
    node_selector: dict[Key, Line] = Field(default={}, description="labels that a node must have")
    node_affinity: dict[Key, tuple[Line, ...]] = Field(default={}, description="labels of nodes, each with its values")
    tolerations: tuple[Toleration, ...] = Field(default=(), description="taints that pods tolerate")
    topology: OptionalKey = Field(default="", description="label of one domain for all pods, as a zone or rack")
    priority_class: OptionalName = Field(default="", description="priority class of the pods")
    service_account: OptionalName = Field(default="", description="service account of the pods")
    queue: OptionalName = Field(default="", description="local queue of Kueue, which admits all pods or none")
    gang: Literal["none", "coscheduling", "volcano"] = Field(default="none", description="gang scheduler without Kueue")
    max_restarts: int = Field(default=3, ge=0, description="restarts of all pods, from the last checkpoint")
    grace_s: int = Field(default=300, ge=30, description="seconds of a save when pods are asked to end")
    keep_s: int = Field(default=86_400, ge=0, description="seconds that finished objects are kept")
    volumes: dict[Label, Volume] = Field(
        default={}, description="shared volumes; the run folder and the data are on them"
    )

    @field_validator("volumes")
    @classmethod
    def _names_are_free(cls, volumes: dict[str, Volume]) -> dict[str, Volume]:
        for name in OWN_VOLUMES & volumes.keys():
            raise ValueError(f"{name!r} is a volume of weft's own")
        return volumes
