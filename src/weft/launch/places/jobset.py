"""A JobSet: one Indexed Job with a pod per node behind a headless service. jobset.x-k8s.io/v1alpha2."""

from __future__ import annotations

from weft.launch.places.pod import (
    NODE,
    Values,
    documents,
    environment,
    field_of,
    job_spec,
    jobset_policies,
    metadata,
    node_command,
    own_environment,
    pod_group,
    pod_template,
    queue_labels,
    resources,
    to_yaml,
    topology,
)
from weft.launch.places.request import PORT, LaunchFile, LaunchRequest

API = "jobset.x-k8s.io/v1alpha2"


def write_jobset(request: LaunchRequest) -> list[LaunchFile]:
    """The documents of the run as a ConfigMap, the group of a gang scheduler, the JobSet."""
    objects = [*documents(request), *pod_group(request), build_jobset(request)]
    return [LaunchFile(name=f"{request.name}.yaml", text=to_yaml(objects))]


def build_jobset(request: LaunchRequest) -> Values:
    container = {"command": node_command(request), "env": _environment(request), "resources": resources(request)}
    pod = pod_template(request, container=container, is_grouped=True)
    sizes = {"parallelism": request.nodes, "completions": request.nodes, "completionMode": "Indexed"}
    job = {"name": NODE, "replicas": 1, "template": {"spec": sizes | job_spec(pod)}}
    queued = {"suspend": True} if request.settings.kubernetes.queue else {}  # Kueue starts it
    return {
        "apiVersion": API,
        "kind": "JobSet",
        "metadata": metadata(request, labels=queue_labels(request), annotations=topology(request)),
        "spec": {**queued, **jobset_policies(request), "replicatedJobs": [job]},
    }


def _environment(request: LaunchRequest) -> list[Values]:
    """The variables of torchrun that Kubeflow's operator would set, and those of the site."""
    sizes = {
        "PET_NNODES": str(request.nodes),
        "PET_NPROC_PER_NODE": str(request.ranks_per_node),
        "PET_MASTER_ADDR": f"{request.name}-{NODE}-0-0.{request.name}",
        "PET_MASTER_PORT": str(PORT),
    }
    index = field_of("metadata.annotations['batch.kubernetes.io/job-completion-index']")
    of_site = environment(request.settings.job.environment)
    return [*environment(sizes), {"name": "PET_NODE_RANK", **index}, *own_environment(request), *of_site]
