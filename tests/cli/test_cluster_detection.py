"""`distributed=true` where a scheduler's variables are set: JAX finds the other processes by them.

The schedulers themselves are not here: their variables are, and the processes are on one machine.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quick import ENVIRONMENT

from .runs import SMALL, losses

NUM_PROCESSES = 2
SETTINGS = [
    *SMALL,
    "base_num_decoder_layers=4",
    "enable_checkpointing=false",
    "steps=2",
]
# What each process of a job finds in its environment.
CLUSTERS: dict[str, Callable[[int], dict[str, str]]] = {
    "slurm": lambda process: {
        "SLURM_JOB_ID": "123",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": f"{NUM_PROCESSES}",
        "SLURM_PROCID": f"{process}",
        "SLURM_LOCALID": f"{process}",
    },
    "open mpi": lambda process: {
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": f"{NUM_PROCESSES}",
        "OMPI_COMM_WORLD_RANK": f"{process}",
        "OMPI_COMM_WORLD_LOCAL_RANK": f"{process}",
    },
}
ENGINES = {
    "slurm": "dcn_pipeline_parallelism=2",
    "open mpi": "pipeline_engine=mpmd dcn_pipeline_parallelism=2 mpmd_timeout_seconds=120",
}


def started(folder: Path, settings: list[str], more: dict[str, str]) -> subprocess.Popen:
    command = [sys.executable, "-m", "jaxpipe", "train", *SETTINGS, *settings]
    return subprocess.Popen(
        [*command, f"output_dir={folder}", "emulate_devices=1"],
        env={**os.environ, **ENVIRONMENT, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(running: list[subprocess.Popen]) -> list[str]:
    """What each has said, when all have ended well."""
    try:
        said = [popen.communicate(timeout=300)[0] for popen in running]
    finally:
        for popen in running:
            popen.kill()
    assert [popen.returncode for popen in running] == [0] * len(running), "\n".join(said)
    return said


def free_port() -> str:
    with socket.socket() as listening:
        listening.bind(("", 0))
        return str(listening.getsockname()[1])


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> list[float]:
    folder = tmp_path_factory.mktemp("plain")
    settings = ["pipeline_engine=none", "per_device_batch_size=8"]
    ended([started(folder, settings, {})])
    return losses(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLUSTERS)
def test_processes_of_a_job_find_each_other_and_have_the_losses_of_one(
    name: str, plain: list[float], tmp_path: Path
):
    # Instead of the port that JAX makes of the number of the job, which may be taken here.
    port = {"JAX_COORDINATOR_PORT": free_port()}
    settings = ["distributed=true", "per_device_batch_size=4", *ENGINES[name].split()]
    running = [
        started(tmp_path, settings, CLUSTERS[name](process) | port)
        for process in range(NUM_PROCESSES)
    ]
    said = ended(running)
    assert "on stage 2" in said[0]
    assert "step 2/2" in said[0] and "step 2/2" not in said[1]  # the first one shows it
    start = json.loads((tmp_path / "default" / "starts.jsonl").read_text())
    assert (start["num_processes"], start["num_devices"]) == (NUM_PROCESSES, 2)
    np.testing.assert_allclose(losses(tmp_path), plain, rtol=1e-5)
