"""A batch script of SLURM."""

import shlex

from ._cluster_job import GRACE_SECONDS, ClusterJob

# SLURM sends SIGTERM before the time is over, and the run ends with a checkpoint and exit code 143.
# `--cpu-bind=none`: a task has one core otherwise, though the job has all of the node.
_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --exclusive
#SBATCH --signal=TERM@{grace}
#SBATCH --requeue
#SBATCH --open-mode=append

# One process a node, with all of its GPUs.
export JAX_LOCAL_DEVICE_IDS={ids}

srun --kill-on-bad-exit=1 --cpu-bind=none \\
    {command}
code=$?
# 0: all steps are made. 2: an error in the settings, which would come again.
if [ "$code" -ne 0 ] && [ "$code" -ne 2 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def slurm_file(job: ClusterJob) -> str:
    """Returns a script for `sbatch`, which starts again from the newest checkpoint."""
    devices = job.devices
    if not devices.is_gpu:
        raise ValueError(
            f"`--devices` is {devices.name} and `--print` slurm, which is for GPUs. TPUs are run "
            "by `--print jobset` or `--print xpk`."
        )
    for name in ("image", "storage"):
        if getattr(job, name):
            raise ValueError(
                f"`--{name}` is given and `--print` is slurm, whose nodes have jaxpipe and "
                "`output_dir` mounted. Leave it out."
            )
    words = ["jaxpipe train", *map(shlex.quote, ("distributed=true", *job.settings))]
    return _SCRIPT.format(
        name=shlex.quote(job.name),
        nodes=devices.num_hosts,
        gpus=devices.chips_per_host,
        grace=GRACE_SECONDS,
        ids=",".join(map(str, range(devices.chips_per_host))),
        command=" \\\n        ".join(words),
        restarts=job.max_restarts,
    )
