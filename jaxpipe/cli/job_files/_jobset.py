"""A JobSet of Kubernetes."""

import re
from typing import Any

import yaml

from ..job import ADDRESS, NUM_PROCESSES, PROCESS
from ..process import USER_ERROR
from ._cluster_job import GRACE_SECONDS, ClusterJob, check_has_volume

_GKE_ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
"""How node pools of GKE name generations of TPUs."""

_PORT = 55527
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_MAX_NAME = 63 - len("-workers-000-0000")
"""Pods are called `NAME-workers-SLICE-HOST`, and have at most 63 characters."""

_CLAIM = "the claim of a volume that all hosts can write, mounted at `output_dir`"


def kubernetes_name(job: ClusterJob) -> str:
    """Returns the name of a job, after checking that Kubernetes takes it."""
    if not re.fullmatch(rf"[a-z]([a-z0-9-]{{0,{_MAX_NAME - 2}}}[a-z0-9])?", job.name):
        raise ValueError(
            f"`run_name` is {job.name!r}, and names in Kubernetes are of at most {_MAX_NAME} "
            "lower-case letters, digits and hyphens, with a letter first. Choose another."
        )
    return job.name


def jobset_file(job: ClusterJob) -> str:
    """Returns a JobSet for `kubectl apply`, which starts again from the newest checkpoint."""
    name, devices = kubernetes_name(job), job.devices
    check_has_volume(job, "jobset", _CLAIM)
    container: dict[str, Any] = {"name": "train", "image": job.image}
    container["command"] = ["jaxpipe", "train"]
    mounts = [{"name": "runs", "mountPath": job.output_dir}]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [container],
        "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": job.storage}}],
    }
    jobset: dict[str, Any] = {"name": name}
    if devices.is_gpu:
        container["args"] = list(job.settings)
        container["env"] = _environment(name, devices.num_hosts)
        container["resources"] = {"limits": {"nvidia.com/gpu": devices.chips_per_host}}
    else:
        # GKE tells JAX the hosts and slices. Their network wants that of the host, and a slice a
        # node pool for itself.
        annotation = "alpha.jobset.sigs.k8s.io/exclusive-topology"
        jobset["annotations"] = {annotation: "cloud.google.com/gke-nodepool"}
        container["args"] = ["distributed=true", *job.settings]
        container["securityContext"] = {"privileged": True}
        container["resources"] = {"limits": {"google.com/tpu": devices.chips_per_host}}
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
        pod["nodeSelector"] = {
            "cloud.google.com/gke-tpu-accelerator": _GKE_ACCELERATORS[devices.generation],
            "cloud.google.com/gke-tpu-topology": devices.topology.partition(":")[2],
        }
        pod["tolerations"] = [{"key": "google.com/tpu", "operator": "Exists"}]
    container["volumeMounts"] = mounts
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": jobset,
        "spec": {
            "failurePolicy": {
                "maxRestarts": job.max_restarts,
                "rules": [
                    {
                        "name": "wrongSettings",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [
                {
                    "name": "workers",
                    "replicas": devices.num_slices,
                    "template": {"spec": _workers(devices.num_hosts, pod)},
                }
            ],
        },
    }
    return yaml.safe_dump(manifest, sort_keys=False, width=120)


def _environment(name: str, num_hosts: int) -> list[dict[str, Any]]:
    """Returns the variables by which processes find each other without asking the cluster."""
    return [
        {"name": ADDRESS, "value": f"{name}-workers-0-0.{name}:{_PORT}"},
        {"name": NUM_PROCESSES, "value": str(num_hosts)},
        {"name": PROCESS, "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
    ]


def _workers(num_hosts: int, pod: dict[str, Any]) -> dict[str, Any]:
    """Returns the spec of the job of a slice, which fails for good at an error in the settings."""
    exit_codes = {"containerName": "train", "operator": "In", "values": [USER_ERROR]}
    return {
        "parallelism": num_hosts,
        "completions": num_hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": exit_codes}]},
        "template": {"spec": pod},
    }
