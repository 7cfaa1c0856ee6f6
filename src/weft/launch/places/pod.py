"""The pod of a node, which JobSet and Kubeflow's runtime share, and the objects around it; YAML out of plain values.

RDMA devices need IPC_LOCK; NCCL and data loaders need more than the 64 MiB that a container has in /dev/shm;
requests equal limits; the grace period covers a save
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from weft.core.errors import BadValueError, ConfigFileError
from weft.launch.places.kubernetes_settings import KubernetesSettings
from weft.launch.places.request import PORT, LaunchRequest, agent_command, verb_words
from weft.train.ranks.environment import ATTEMPT_VARIABLE, JOB_VARIABLE

NODE = "node"  # of the replicated job and its container; Kubeflow's operator requires this name
DOCUMENTS = "/etc/weft"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
TOPOLOGY_ANNOTATION = "alpha.jobset.sigs.k8s.io/exclusive-topology"
STOPPED = 143  # a pod that was asked to end has not completed the job: 0 would say so
BAD_INPUT = 2
Values = dict[str, Any]

_SCHEDULERS = {"coscheduling": "scheduler-plugins-scheduler", "volcano": "volcano"}
_GROUP_LABEL = {"coscheduling": "scheduling.x-k8s.io/pod-group"}
_GROUP_ANNOTATION = {"volcano": "scheduling.k8s.io/group-name"}
_GROUP_API = {"coscheduling": "scheduling.x-k8s.io/v1alpha1", "volcano": "scheduling.volcano.sh/v1beta1"}


def metadata(request: LaunchRequest, *, labels: Mapping[str, str] = {}, annotations: Mapping[str, str] = {}) -> Values:
    found: Values = {"name": request.name, "namespace": request.settings.kubernetes.namespace}
    return found | _present(labels=dict(labels), annotations=dict(annotations))


def queue_labels(request: LaunchRequest) -> dict[str, str]:
    queue = request.settings.kubernetes.queue
    return {QUEUE_LABEL: queue} if queue else {}


def topology(request: LaunchRequest) -> dict[str, str]:
    label = request.settings.kubernetes.topology
    return {TOPOLOGY_ANNOTATION: label} if label else {}


def documents(request: LaunchRequest) -> list[Values]:
    """run.toml and plan.toml as one ConfigMap; none without files."""
    if not request.documents:
        return []
    try:
        data = {name: request.documents[given].read_text(encoding="utf-8") for given, name in _names(request).items()}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"a document cannot be read: {error}", hint="check the path") from None
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(request), "data": data}]


def pod_group(request: LaunchRequest) -> list[Values]:
    gang = request.settings.kubernetes.gang
    if gang == "none":
        return []
    spec = {"minMember": request.nodes}
    return [{"apiVersion": _GROUP_API[gang], "kind": "PodGroup", "metadata": metadata(request), "spec": spec}]


def job_spec(pod: Values) -> Values:
    """What the batch Job of all nodes has besides their number: one failed pod fails it, bad input by name."""
    rule = {"action": "FailJob", "onExitCodes": {"containerName": NODE, "operator": "In", "values": [BAD_INPUT]}}
    return {"backoffLimit": 0, "podFailurePolicy": {"rules": [rule]}, "template": pod}


def jobset_policies(request: LaunchRequest) -> Values:
    """Restarts of all pods after a failure, but for bad input, which would fail again."""
    site = request.settings.kubernetes
    never = {"name": "badInput", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All"},
        "failurePolicy": {"maxRestarts": site.max_restarts, "rules": [never]},
        "ttlSecondsAfterFinished": site.keep_s,
    }


def pod_template(request: LaunchRequest, *, container: Values, is_grouped: bool) -> Values:
    """`container`: what depends on the kind. `is_grouped`: the pods carry the name of their group themselves."""
    site = request.settings.kubernetes
    labels = {_GROUP_LABEL[site.gang]: request.name} if is_grouped and site.gang in _GROUP_LABEL else {}
    annotations = {_GROUP_ANNOTATION[site.gang]: request.name} if is_grouped and site.gang in _GROUP_ANNOTATION else {}
    if site.networks:
        annotations["k8s.v1.cni.cncf.io/networks"] = site.networks
    named = _present(labels=labels, annotations=annotations)
    spec: Values = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": site.grace_s,
        **_placement(site),
        "containers": [_container(request, container)],
        "volumes": _volumes(request),
    }
    return ({"metadata": named} if named else {}) | {"spec": spec}


def resources(request: LaunchRequest) -> Values:
    site, ranks = request.settings.kubernetes, request.ranks_per_node
    amounts: dict[str, Any] = {"cpu": site.cpus_per_rank * ranks, "memory": _times(site.memory_per_rank, ranks)}
    if request.on_gpus:
        amounts[site.gpu_resource] = ranks
    if site.rdma_per_node:
        amounts[site.rdma_resource] = site.rdma_per_node
    return {"limits": amounts, "requests": dict(amounts)}


def node_command(request: LaunchRequest) -> list[str]:
    """The container's command: the node's agent, or a verb that starts its own processes."""
    python = request.settings.job.python or "python"
    words = _moved(request, verb_words(request))
    if request.has_agents:
        start = ["--id", request.name, "--stopped-code", str(STOPPED), "--"]
        return [*agent_command(request, python=python), *start, *words, "--out", run_folder(request), "--continue"]
    return [python, "-m", "weft", *words, *(["--out", run_folder(request)] if request.verb != ("verify",) else [])]


def run_folder(request: LaunchRequest) -> str:
    """The folder of the run, which must be on a volume: a pod's own disk goes with it, and every node has another."""
    volumes = [volume for volume in request.settings.kubernetes.volumes.values() if not volume.read_only]
    if not volumes:
        raise BadValueError(
            "no volume for the run folder: pods share no disk",
            hint="[kubernetes.volumes.runs] with claim = 'NAME' and path = '/runs' in launch.toml",
        )
    folder = request.out or f"{volumes[0].path.rstrip('/')}/{request.name}"
    if not any(PurePosixPath(folder).is_relative_to(volume.path) for volume in volumes):
        paths = ", ".join(volume.path for volume in volumes)
        raise BadValueError(f"--out {folder} is on none of the writable volumes", hint=f"a folder under {paths}")
    return folder


def require_image(request: LaunchRequest) -> str:
    if not request.settings.kubernetes.image:
        raise BadValueError("no container image is named", hint="--set kubernetes.image=REGISTRY/weft:TAG")
    return request.settings.kubernetes.image


def environment(values: Mapping[str, str]) -> list[Values]:
    return [{"name": name, "value": value} for name, value in values.items()]


def own_environment(request: LaunchRequest) -> list[Values]:
    """How a lock of the run folder knows an earlier start of this job: JobSet labels pods with the attempt."""
    job = f"jobset {request.settings.kubernetes.namespace}/{request.name}"
    attempt = field_of("metadata.labels['jobset.sigs.k8s.io/restart-attempt']")
    return [{"name": JOB_VARIABLE, "value": job}, {"name": ATTEMPT_VARIABLE, **attempt}]


def field_of(path: str) -> Values:
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


def to_yaml(objects: list[Values]) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        pass

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.ignore_aliases = lambda *_: True
    Dumper.add_representer(str, text)
    dumped = (yaml.dump(one, Dumper=Dumper, sort_keys=False, width=1000) for one in objects)
    return "# Written by `weft launch`; `kubectl apply -f FILE` submits it.\n" + "---\n".join(dumped)


def _container(request: LaunchRequest, given: Values) -> Values:
    site = request.settings.kubernetes
    mounts: list[Values] = [{"name": "shm", "mountPath": "/dev/shm"}]
    mounts += [{"name": "documents", "mountPath": DOCUMENTS}] if request.documents else []
    mounts += [
        {"name": name, "mountPath": volume.path} | ({"readOnly": True} if volume.read_only else {})
        for name, volume in site.volumes.items()
    ]
    container: Values = {"name": NODE, "image": require_image(request), "imagePullPolicy": site.pull_policy, **given}
    container |= {"ports": [{"containerPort": PORT}], "volumeMounts": mounts}
    if site.rdma_per_node:
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    return container


def _volumes(request: LaunchRequest) -> list[Values]:
    site = request.settings.kubernetes
    volumes: list[Values] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": site.shm}}]
    if request.documents:
        volumes.append({"name": "documents", "configMap": {"name": request.name}})
    for name, volume in site.volumes.items():
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": volume.claim}})
    return volumes


def _placement(site: KubernetesSettings) -> Values:
    needed = [{"key": key, "operator": "In", "values": list(values)} for key, values in site.node_affinity.items()]
    terms = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": needed}]}}
    return _present(
        schedulerName=_SCHEDULERS.get(site.gang, ""),
        serviceAccountName=site.service_account,
        priorityClassName=site.priority_class,
        imagePullSecrets=[{"name": site.pull_secret}] if site.pull_secret else [],
        nodeSelector=dict(site.node_selector),
        affinity={"nodeAffinity": terms} if needed else {},
        tolerations=[
            {"key": one.key, "operator": "Equal" if one.value else "Exists"}
            | _present(value=one.value, effect="" if one.effect == "any" else one.effect)
            for one in site.tolerations
        ],
    )


def _names(request: LaunchRequest) -> dict[str, str]:
    """Argument -> name in the ConfigMap; files of one name in two folders get numbers."""
    names: dict[str, str] = {}
    for given, path in request.documents.items():
        taken = path.name in names.values()
        names[given] = f"{len(names)}-{path.name}" if taken else path.name
    return names


def _moved(request: LaunchRequest, words: list[str]) -> list[str]:
    names = _names(request)
    return [f"{DOCUMENTS}/{names[word]}" if word in names else word for word in words]


def _times(quantity: str, count: int) -> str:
    number, unit = re.fullmatch(r"([\d.]+)(\D*)", quantity).groups()  # type: ignore[union-attr]
    return f"{float(number) * count:g}{unit}" if "." in number else f"{int(number) * count}{unit}"


def _present(**values: Any) -> Values:
    return {key: value for key, value in values.items() if value}
