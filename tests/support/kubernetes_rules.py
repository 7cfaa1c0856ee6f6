"""What a Kubernetes server, its operators and NCCL require of a manifest beyond the types of its fields.

    problems_of(objects)     every problem, of all objects of a file; types by `kubernetes_schemas`

Where the rules are: validating webhooks and CEL rules of JobSet v0.12 and Kubeflow Trainer v2.3, validation of batch/v1
Jobs and pods; rules of RDMA and shared memory are the practice of this field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kubernetes_schemas import problems as type_problems

Values = dict[str, Any]
PLAIN_KINDS = {
    "ConfigMap": {"apiVersion", "kind", "metadata", "data"},
    "PodGroup": {"apiVersion", "kind", "metadata", "spec"},
}
RESERVED = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
REASONS = {
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
}
MANAGERS = ("trainer.kubeflow.org/trainjob-controller", "kueue.x-k8s.io/multikueue")
CONFIG_MAP_BYTES = 2**20
_LABEL_1035 = r"[a-z]([-a-z0-9]*[a-z0-9])?"
_LABEL_VALUE = r"|[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_RULE_NAME = r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?"


def problems_of(objects: list[Values]) -> list[str]:
    found: list[str] = []
    for one in objects:
        kind = one.get("kind", "")
        if kind in PLAIN_KINDS:
            found += [f"{kind}: unknown field {name}" for name in one.keys() - PLAIN_KINDS[kind]]
        else:
            found += type_problems(one, kind)
    return found or [problem for one in objects for problem in _rules(one, objects)]


def _rules(one: Values, objects: list[Values]) -> Iterator[str]:
    for text in one["metadata"].get("labels", {}).values():
        if not re.fullmatch(_LABEL_VALUE, text):
            yield f"metadata.labels: {text!r} is no value of a label"
    if one["kind"] == "ConfigMap" and sum(len(text.encode()) for text in one["data"].values()) > CONFIG_MAP_BYTES:
        yield "data: more than 1 MiB"
    elif one["kind"] == "JobSet":
        yield from _jobset_rules(one["spec"], name=one["metadata"]["name"])
        yield from _pod_rules_of(one["spec"], objects, is_whole=True)
    elif one["kind"] == "TrainingRuntime":
        yield from _runtime_rules(one["spec"])
        yield from _pod_rules_of(one["spec"]["template"]["spec"], objects, is_whole=False)
    elif one["kind"] == "TrainJob":
        yield from _trainjob_rules(one, objects)


def _jobset_rules(spec: Values, *, name: str) -> Iterator[str]:
    jobs = spec.get("replicatedJobs", [])
    names = {job["name"] for job in jobs}
    if any("dependsOn" in job for job in jobs[:1]):
        yield "dependsOn: the first replicated job has none before it"
    if spec.get("startupPolicy", {}).get("startupPolicyOrder") == "InOrder" and any("dependsOn" in job for job in jobs):
        yield "startupPolicy and dependsOn exclude each other"
    for job in jobs:
        batch, replicas = job["template"]["spec"], job.get("replicas", 1)
        pod = f"{name}-{job['name']}-{replicas - 1}-{batch.get('completions', 1) - 1}-abcde"
        if len(pod) > 63 or not re.fullmatch(_LABEL_1035, pod):
            yield f"the pods' names, such as {pod}, are no DNS label of at most 63 letters"
        if not re.fullmatch(_LABEL_1035, job.get("groupName", "default")):
            yield "groupName is no DNS label"
    subdomain = spec.get("network", {}).get("subdomain", "default")
    if len(subdomain) > 63 or not re.fullmatch(_LABEL_1035, subdomain):
        yield "network.subdomain is no DNS label"
    targets = list(spec.get("successPolicy", {}).get("targetReplicatedJobs", []))
    rules = spec.get("failurePolicy", {}).get("rules", [])
    if len({rule["name"] for rule in rules}) < len(rules):
        yield "failurePolicy.rules: two have one name"
    for rule in rules:
        targets += rule.get("targetReplicatedJobs", [])
        if len(rule["name"]) > 128 or not re.fullmatch(_RULE_NAME, rule["name"]):
            yield f"failurePolicy.rules: {rule['name']!r} is no name"
        yield from (
            f"{one!r} is no reason of a failed job" for one in rule.get("onJobFailureReasons", []) if one not in REASONS
        )
    yield from (f"there is no replicated job {target!r}" for target in targets if target not in names)


def _runtime_rules(spec: Values) -> Iterator[str]:
    policy = spec.get("mlPolicy", {})
    if sum(name in policy for name in ("torch", "mpi", "jax", "xgboost", "flux")) > 1:
        yield "mlPolicy: more than one framework"
    yield from _jobset_rules(spec["template"]["spec"], name="runtime")
    for job in spec["template"]["spec"].get("replicatedJobs", []):
        ancestor = (
            job["template"].get("metadata", {}).get("labels", {}).get("trainer.kubeflow.org/trainjob-ancestor-step")
        )
        if ancestor is None:
            continue
        if job.get("replicas", 1) != 1:
            yield "replicas must be 1"
        wanted = "node" if ancestor == "trainer" else ancestor
        if not any(box["name"] == wanted for box in _pod(job)["containers"]):
            yield f"no container {wanted!r} for the step {ancestor!r}"


def _trainjob_rules(one: Values, objects: list[Values]) -> Iterator[str]:
    name, spec = one["metadata"]["name"], one["spec"]
    if len(name) > 63 or not re.fullmatch(_LABEL_1035, name):
        yield "metadata.name is no DNS label"
    if spec.get("managedBy", MANAGERS[0]) not in MANAGERS:
        yield "managedBy is neither the operator nor Kueue"
    trainer = spec.get("trainer", {})
    if trainer.get("numProcPerNode", 1) < 1:
        yield "numProcPerNode is below 1"
    yield from (
        f"the operator sets {entry['name']} itself" for entry in trainer.get("env", []) if entry["name"] in RESERVED
    )
    reference = spec["runtimeRef"]
    runtime = next(
        (o for o in objects if (o["kind"], o["metadata"]["name"]) == (reference.get("kind"), reference["name"])), None
    )
    if runtime is None or runtime["metadata"].get("namespace") != one["metadata"].get("namespace"):
        yield "runtimeRef: no such runtime in this namespace"
        return
    resources = trainer.get("resourcesPerNode", {})
    yield from _resource_rules(resources, ranks=trainer.get("numProcPerNode", 1))
    [job] = [job for job in runtime["spec"]["template"]["spec"]["replicatedJobs"] if job["name"] == "node"]
    for box in _pod(job)["containers"]:
        yield from _rdma_rules(box, resources)


def _pod_rules_of(spec: Values, objects: list[Values], *, is_whole: bool) -> Iterator[str]:
    """`is_whole`: the pods are complete; a runtime's get their number, image, command and resources from a TrainJob."""
    maps = {one["metadata"]["name"] for one in objects if one["kind"] == "ConfigMap"}
    for job in spec.get("replicatedJobs", []):
        batch, pod = job["template"]["spec"], _pod(job)
        if is_whole and (batch.get("completionMode") != "Indexed" or "completions" not in batch):
            yield "ranks need the index of their pod: completionMode Indexed with completions"
        if is_whole and batch.get("parallelism") != batch.get("completions"):
            yield "parallelism differs from completions: some ranks would wait for others that never start"
        rules = batch.get("podFailurePolicy", {}).get("rules", [])
        if rules and pod.get("restartPolicy") != "Never":
            yield "podFailurePolicy requires restartPolicy Never"
        boxes = {box["name"] for box in pod["containers"]}
        for rule in rules:
            exits = rule.get("onExitCodes", {})
            if exits.get("containerName", "") not in {"", *boxes}:
                yield f"podFailurePolicy: no container {exits['containerName']!r}"
            if exits.get("operator") == "In" and 0 in exits.get("values", []):
                yield "podFailurePolicy: exit code 0 is no failure"
            if rule["action"] == "FailIndex" and "backoffLimitPerIndex" not in batch:
                yield "podFailurePolicy: FailIndex requires backoffLimitPerIndex"
        if pod.get("terminationGracePeriodSeconds", 30) < 60:
            yield "the grace period is shorter than a save"
        yield from _volume_rules(pod, maps)
        for box in pod["containers"]:
            if is_whole:
                yield from _container_rules(box)


def _volume_rules(pod: Values, maps: set[str]) -> Iterator[str]:
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    if len(volumes) < len(pod.get("volumes", [])):
        yield "two volumes have one name"
    for volume in volumes.values():
        if "configMap" in volume and volume["configMap"]["name"] not in maps:
            yield f"there is no ConfigMap {volume['configMap']['name']}"
    memory = {name for name, volume in volumes.items() if volume.get("emptyDir", {}).get("medium") == "Memory"}
    for box in pod["containers"]:
        mounts = box.get("volumeMounts", [])
        yield from (f"there is no volume {mount['name']!r}" for mount in mounts if mount["name"] not in volumes)
        if len({mount["mountPath"] for mount in mounts}) < len(mounts):
            yield "two mounts have one path"
        if not any(mount["mountPath"] == "/dev/shm" and mount["name"] in memory for mount in mounts):
            yield "/dev/shm is not a memory volume: 64 MiB are too few for NCCL and data loaders"


def _container_rules(box: Values) -> Iterator[str]:
    names = [entry["name"] for entry in box.get("env", [])]
    if len(set(names)) < len(names):
        yield "a variable is set twice"
    if not box.get("image"):
        yield "no image"
    values = {entry["name"]: entry.get("value") for entry in box.get("env", [])}
    resources = box.get("resources", {})
    if "PET_NPROC_PER_NODE" in values:
        yield from _resource_rules(resources, ranks=int(values["PET_NPROC_PER_NODE"]))
    yield from _rdma_rules(box, resources)


def _resource_rules(resources: Values, *, ranks: int) -> Iterator[str]:
    limits = resources.get("limits", {})
    if limits != resources.get("requests"):
        yield "requests differ from limits"
    gpus = [amount for name, amount in limits.items() if name.endswith("/gpu")]
    if gpus and int(gpus[0]) < ranks:
        yield f"{ranks} ranks on {gpus[0]} GPUs"


def _rdma_rules(box: Values, resources: Values) -> Iterator[str]:
    has_rdma = any("rdma" in name for name in resources.get("limits", {}))
    if has_rdma and "IPC_LOCK" not in box.get("securityContext", {}).get("capabilities", {}).get("add", []):
        yield "an RDMA device without IPC_LOCK: memory cannot be registered"


def _pod(job: Values) -> Values:
    pod: Values = job["template"]["spec"]["template"]["spec"]
    return pod
