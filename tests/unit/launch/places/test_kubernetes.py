"""The manifests against the published schemas, the rules of the servers and the practice of the field."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_rules import problems_of

from weft.core.errors import WeftError
from weft.launch.places.jobset import write_jobset
from weft.launch.places.request import LaunchRequest
from weft.launch.places.settings import LaunchSettings
from weft.launch.places.trainjob import write_trainjob

GOLDEN = Path(__file__).with_name("golden")
WRITERS = {"jobset": write_jobset, "trainjob": write_trainjob}
RUNS = {"runs": {"claim": "team-runs", "path": "/runs"}}
SITE: dict[str, Any] = {
    "job": {"environment": {"NCCL_DEBUG": "WARN"}},
    "kubernetes": {
        "namespace": "research",
        "image": "registry.example/weft:1",
        "rdma_resource": "rdma/rdma_shared_device_a",
        "rdma_per_node": 8,
        "networks": "rdma-net-0,rdma-net-1",
        "node_selector": {"pool": "gpu"},
        "node_affinity": {"nvidia.com/gpu.product": ["H100-SXM", "H200"]},
        "tolerations": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}],
        "topology": "topology.kubernetes.io/zone",
        "queue": "team-queue",
        "priority_class": "high",
        "service_account": "trainer",
        "pull_secret": "registry",
        "volumes": {**RUNS, "texts": {"claim": "texts", "path": "/texts", "read_only": True}},
    },
}
PLAIN = {"kubernetes": {"image": "weft:1", "volumes": RUNS}}
# Sites that differ in what is written; each must be right for both kinds.
SITES: dict[str, dict[str, Any]] = {
    "everything": SITE,
    "nothing": PLAIN,
    "coscheduling": {"kubernetes": {**PLAIN["kubernetes"], "gang": "coscheduling"}},
    "volcano": {"kubernetes": {**PLAIN["kubernetes"], "gang": "volcano", "memory_per_rank": "1.5Gi"}},
    "other devices": {"kubernetes": {**PLAIN["kubernetes"], "gpu_resource": "amd.com/gpu", "rdma_per_node": 1}},
}


@pytest.fixture
def request_(tmp_path: Path) -> LaunchRequest:
    (tmp_path / "run.toml").write_text('[model]\ntype = "llama"\n', encoding="utf-8")
    (tmp_path / "plan.toml").write_text("[mesh]\ndp_shard = 32\n\n[data_parallel]\nzero = 3\n", encoding="utf-8")
    return LaunchRequest(
        verb=("train",),
        arguments=("run.toml", "--plan", "plan.toml", "--set", "train.seed=1"),
        name="big",
        nodes=4,
        ranks_per_node=8,
        on_gpus=True,
        folder=tmp_path,
        max_restarts=1,
        settings=LaunchSettings.from_tables(SITE),
        documents={name: tmp_path / name for name in ("run.toml", "plan.toml")},
    )


def objects_of(kind: str, request: LaunchRequest) -> list[Any]:
    (file,) = WRITERS[kind](request)
    return list(yaml.safe_load_all(file.text))


def of_site(request: LaunchRequest, site: dict[str, Any]) -> LaunchRequest:
    return replace(request, settings=LaunchSettings.from_tables(site))


@pytest.mark.parametrize("kind", WRITERS)
def test_the_manifest_is_the_golden_one(kind: str, request_: LaunchRequest) -> None:
    (file,) = WRITERS[kind](request_)
    assert file.text == (GOLDEN / f"{kind}.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("kind", WRITERS)
def test_every_manifest_is_right(kind: str, site: str, request_: LaunchRequest) -> None:
    given = of_site(request_, SITES[site])
    for request in (given, replace(given, on_gpus=False), replace(given, documents={}, arguments=())):
        assert problems_of(objects_of(kind, request)) == []
    one = replace(given, verb=("verify",), nodes=1)
    assert problems_of(objects_of(kind, one)) == []


def test_pods_find_the_documents_the_run_folder_and_the_first_node(request_: LaunchRequest) -> None:
    documents, jobset = objects_of("jobset", request_)
    assert documents["data"]["plan.toml"].endswith("zero = 3\n")
    [box] = pod(jobset)["containers"]
    words = box["command"]
    assert words[words.index("train") :] == [
        *("train", "/etc/weft/run.toml", "--plan", "/etc/weft/plan.toml", "--set", "train.seed=1"),
        *("--out", "/runs/big", "--continue"),
    ]
    values = {entry["name"]: entry.get("value") for entry in box["env"]}
    assert (values["PET_MASTER_ADDR"], values["NCCL_DEBUG"]) == ("big-node-0-0.big", "WARN")
    assert box["resources"]["limits"]["memory"] == "256Gi"


def pod(jobset: Any) -> Any:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def batch(jobset: Any) -> Any:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]


def box(jobset: Any) -> Any:
    return pod(jobset)["containers"][0]


def runtime_job(runtime: Any) -> Any:
    return runtime["spec"]["template"]["spec"]["replicatedJobs"][0]


# What is broken in the JobSet, and what the checks must say of it.
BROKEN_JOBSETS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a misspelt field": (lambda m: batch(m).update(paralelism=4), "unknown field paralelism"),
    "a number as text": (lambda m: batch(m).update(completions="four"), "'four' is not a integer"),
    "a field in the wrong place": (lambda m: m["spec"].update(backoffLimit=1), "unknown field backoffLimit"),
    "a wrong type in a container": (lambda m: box(m).update(imagePullPolicy=3), "3 is not a string"),
    "no name of a container": (lambda m: box(m).pop("name"), "name is missing"),
    "variables as a table": (lambda m: box(m).update(env={"A": "1"}), "env: not a list"),
    "a list of restarts": (lambda m: m["spec"].update(failurePolicy=[3]), "failurePolicy: not a table"),
    "a negative time to keep": (lambda m: m["spec"].update(ttlSecondsAfterFinished=-1), "-1 is below 0"),
    "an unknown action": (lambda m: m["spec"]["failurePolicy"]["rules"][0].update(action="Stop"), "'Stop' is none of"),
    "an unknown reason": (
        lambda m: m["spec"]["failurePolicy"]["rules"][0].update(onJobFailureReasons=["BadInput"]),
        "'BadInput' is no reason",
    ),
    "a rule's name": (lambda m: m["spec"]["failurePolicy"]["rules"][0].update(name="bad-input"), "is no name"),
    "a rule for another job": (
        lambda m: m["spec"]["failurePolicy"]["rules"][0].update(targetReplicatedJobs=["nodes"]),
        "no replicated job 'nodes'",
    ),
    "a name that is too long": (lambda m: m["metadata"].update(name="a" * 50), "at most 63"),
    "a name that begins with a digit": (lambda m: m["metadata"].update(name="7b"), "no DNS label"),
    "pods without an index": (lambda m: batch(m).update(completionMode="NonIndexed"), "Indexed"),
    "too few pods at a time": (lambda m: batch(m).update(parallelism=2), "parallelism differs"),
    "restarts of containers": (lambda m: pod(m).update(restartPolicy="OnFailure"), "restartPolicy Never"),
    "a policy for no container": (
        lambda m: batch(m)["podFailurePolicy"]["rules"][0]["onExitCodes"].update(containerName="main"),
        "no container 'main'",
    ),
    "a failure with code 0": (
        lambda m: batch(m)["podFailurePolicy"]["rules"][0]["onExitCodes"].update(values=[0, 2]),
        "exit code 0",
    ),
    "RDMA without IPC_LOCK": (lambda m: box(m).pop("securityContext"), "IPC_LOCK"),
    "no shared memory": (lambda m: box(m)["volumeMounts"].pop(0), "/dev/shm"),
    "shared memory on a disk": (lambda m: pod(m)["volumes"][0].update(emptyDir={}), "/dev/shm"),
    "a mount of no volume": (lambda m: pod(m)["volumes"].pop(), "no volume 'texts'"),
    "a ConfigMap that is not there": (
        lambda m: pod(m)["volumes"][1]["configMap"].update(name="other"),
        "no ConfigMap other",
    ),
    "requests that differ": (
        lambda m: box(m)["resources"]["requests"].update({"nvidia.com/gpu": 4}),
        "requests differ",
    ),
    "more ranks than GPUs": (lambda m: halve_gpus(box(m)["resources"]), "8 ranks on 4 GPUs"),
    "a variable twice": (lambda m: box(m)["env"].append({"name": "NCCL_DEBUG", "value": "INFO"}), "set twice"),
    "no time for a save": (lambda m: pod(m).update(terminationGracePeriodSeconds=30), "shorter than a save"),
    "a queue that is no label": (lambda m: m["metadata"]["labels"].update({"queue": "a b"}), "no value of a label"),
}
# The same of the runtime and the TrainJob.
BROKEN_TRAINJOBS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "IPC_LOCK in the TrainJob": (
        lambda r, t: t["spec"]["trainer"].update(securityContext={}),
        "unknown field securityContext",
    ),
    "a reserved variable": (
        lambda r, t: t["spec"]["trainer"]["env"].append({"name": "PET_NNODES", "value": "4"}),
        "sets PET_NNODES itself",
    ),
    "another container": (lambda r, t: runtime_box(r).update(name="main"), "no container 'node'"),
    "two replicas": (lambda r, t: runtime_job(r).update(replicas=2), "replicas must be 1"),
    "two frameworks": (lambda r, t: r["spec"]["mlPolicy"].update(mpi={}), "more than one framework"),
    "RDMA without IPC_LOCK": (lambda r, t: runtime_box(r).pop("securityContext"), "IPC_LOCK"),
    "another runtime": (lambda r, t: t["spec"]["runtimeRef"].update(name="other"), "no such runtime"),
    "a runtime elsewhere": (lambda r, t: r["metadata"].update(namespace="other"), "no such runtime"),
    "another manager": (lambda r, t: t["spec"].update(managedBy="me"), "managedBy"),
    "no reference": (lambda r, t: t["spec"].pop("runtimeRef"), "runtimeRef is missing"),
    "a name with a dot": (lambda r, t: t["metadata"].update(name="big.one"), "no DNS label"),
    "no ranks": (lambda r, t: t["spec"]["trainer"].update(numProcPerNode=0), "below 1"),
}


def runtime_box(runtime: Any) -> Any:
    return runtime_job(runtime)["template"]["spec"]["template"]["spec"]["containers"][0]


def halve_gpus(resources: Any) -> None:
    for amounts in resources.values():
        amounts["nvidia.com/gpu"] = 4


@pytest.mark.parametrize("case", BROKEN_JOBSETS)
def test_a_broken_jobset_is_named(case: str, request_: LaunchRequest) -> None:
    spoil, sentence = BROKEN_JOBSETS[case]
    documents, jobset = copy.deepcopy(objects_of("jobset", request_))
    spoil(jobset)
    found = problems_of([documents, jobset])
    assert any(sentence in one for one in found), found


@pytest.mark.parametrize("case", BROKEN_TRAINJOBS)
def test_a_broken_trainjob_is_named(case: str, request_: LaunchRequest) -> None:
    spoil, sentence = BROKEN_TRAINJOBS[case]
    documents, runtime, trainjob = copy.deepcopy(objects_of("trainjob", request_))
    spoil(runtime, trainjob)
    found = problems_of([documents, runtime, trainjob])
    assert any(sentence in one for one in found), found


@pytest.mark.parametrize(
    ("site", "out", "sentence"),
    [
        ({"kubernetes": {"volumes": RUNS}}, None, "no container image"),
        ({"kubernetes": {"image": "weft:1"}}, None, "no volume for the run folder"),
        (PLAIN, "runs/big", "on none of the writable volumes"),
        (SITE, "/texts/big", "on none of the writable volumes"),
    ],
)
@pytest.mark.parametrize("kind", WRITERS)
def test_what_pods_cannot_do_without_is_asked_for(
    kind: str, site: dict[str, Any], out: str | None, sentence: str, request_: LaunchRequest
) -> None:
    with pytest.raises(WeftError, match=sentence) as raised:
        WRITERS[kind](replace(of_site(request_, site), out=out))
    assert raised.value.hint


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("namespace", "Research"),
        ("rdma_resource", "rdma hca"),
        ("shm", "16 gigabytes"),
        ("volumes", {"shm": {"claim": "a", "path": "/a"}}),
        ("volumes", {"a": {"claim": "a", "path": "a"}}),
        ("gang", "slurm"),
    ],
)
def test_names_that_a_server_would_refuse_are_refused_here(key: str, value: Any) -> None:
    with pytest.raises(WeftError, match=key):
        LaunchSettings.from_tables({"kubernetes": {key: value}})
