"""A TrainJob of Kubeflow Trainer v2 and the TrainingRuntime that it refers to. trainer.kubeflow.org/v1alpha1.

A TrainJob has no place for IPC_LOCK, /dev/shm, volumes and restarts: they are the runtime's, so both are written. The
operator sets the number of pods and torchrun's variables, and makes a JobSet of the TrainJob's name.
"""

from __future__ import annotations

from weft.launch.places.pod import (
    NODE,
    Values,
    documents,
    environment,
    job_spec,
    jobset_policies,
    metadata,
    node_command,
    own_environment,
    pod_template,
    queue_labels,
    require_image,
    resources,
    to_yaml,
    topology,
)
from weft.launch.places.request import LaunchFile, LaunchRequest

API = "trainer.kubeflow.org/v1alpha1"
_ANCESTOR = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
_FRAMEWORK = {"trainer.kubeflow.org/framework": "torch"}


def write_trainjob(request: LaunchRequest) -> list[LaunchFile]:
    """The documents of the run as a ConfigMap, the runtime, the TrainJob."""
    objects = [*documents(request), build_runtime(request), build_trainjob(request)]
    return [LaunchFile(name=f"{request.name}.yaml", text=to_yaml(objects))]


def build_runtime(request: LaunchRequest) -> Values:
    gang = request.settings.kubernetes.gang
    pod = pod_template(request, container={"env": own_environment(request)}, is_grouped=False)
    job = {"name": NODE, "replicas": 1, "template": {"metadata": {"labels": _ANCESTOR}, "spec": job_spec(pod)}}
    annotated = {"metadata": {"annotations": topology(request)}} if topology(request) else {}
    return {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": metadata(request, labels=_FRAMEWORK),
        "spec": {
            "mlPolicy": {"numNodes": request.nodes, "torch": {}},
            **({} if gang == "none" else {"podGroupPolicy": {gang: {}}}),
            "template": {**annotated, "spec": {**jobset_policies(request), "replicatedJobs": [job]}},
        },
    }


def build_trainjob(request: LaunchRequest) -> Values:
    of_site = environment(request.settings.job.environment)
    trainer = {
        "image": require_image(request),
        "command": node_command(request),
        **({"env": of_site} if of_site else {}),
        "numNodes": request.nodes,
        "numProcPerNode": request.ranks_per_node,
        "resourcesPerNode": resources(request),
    }
    queued = {"suspend": True} if request.settings.kubernetes.queue else {}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": request.name}
    return {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": metadata(request, labels=queue_labels(request)),
        "spec": {**queued, "runtimeRef": reference, "trainer": trainer},
    }
