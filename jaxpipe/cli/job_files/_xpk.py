"""A script that gives a run to xpk, Google's tool for TPUs in GKE."""

import shlex

from ._cluster_job import GRACE_SECONDS, ClusterJob, check_has_volume
from ._jobset import kubernetes_name

_PREFIXES = {"v5e": "v5litepod"}
"""Generations that xpk calls otherwise."""

# xpk starts a job again by itself after the exit codes of signals. 2 is an error in the settings.
_SCRIPT = """\
#!/bin/bash
# xpk asks for the project and the zone that gcloud is configured for.
xpk workload create --cluster "${{CLUSTER:?Set CLUSTER to the name of the cluster.}}" \\
    --workload {name} --tpu-type {tpu} --num-slices {slices} \\
    --docker-image {image} --storage {storage} \\
    --max-restarts {restarts} --restart-on-exit-codes 1 \\
    --termination-grace-period-seconds {grace} \\
    --command {command} "$@"
"""


def xpk_file(job: ClusterJob) -> str:
    """Returns a shell script, which starts again from the newest checkpoint."""
    devices = job.devices
    if devices.is_gpu:
        raise ValueError(
            f"`--devices` is {devices.name} and `--print` xpk, which is for TPUs. GPUs are run by "
            "`--print slurm` or `--print jobset`."
        )
    check_has_volume(job, "xpk", "xpk's name of the storage")
    prefix = _PREFIXES.get(devices.generation, devices.generation)
    words = ["jaxpipe", "train", "distributed=true", *job.settings]
    return _SCRIPT.format(
        name=kubernetes_name(job),
        tpu=f"{prefix}-{devices.topology.partition(':')[2]}",
        slices=devices.num_slices,
        image=shlex.quote(job.image),
        storage=shlex.quote(job.storage),
        restarts=job.max_restarts,
        grace=GRACE_SECONDS,
        command=shlex.quote(shlex.join(words)),
    )
