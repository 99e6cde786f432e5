"""`jaxpipe launch --print`: settings, hosts and restarts of the files for SLURM, JobSet and xpk."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from jaxpipe.cli import main
from jaxpipe.models import PRESETS
from jaxpipe.train import Config, load_config
from quick import ENVIRONMENT

from .runs import SMALL, losses, run_jaxpipe

SETTINGS = ["run_name=a-run", "output_dir=/shared/runs", "dcn_pipeline_parallelism=2"]
TEXT = ["dataset_type=text", r'text_separator="\n--\n"', "data_files=[/a b.txt, /c.txt]", "steps=7"]
IN_IMAGE = ["--image", "place/image:1", "--storage", "claim"]


def printed(kind: str, devices: str, *words: str, capsys: pytest.CaptureFixture) -> str:
    assert main(["launch", "--print", kind, "--devices", devices, *SETTINGS, *words]) == 0
    return capsys.readouterr().out


def command(text: str) -> list[str]:
    """The words of the command inside a script."""
    lines = text.replace("\\\n", " ").splitlines()
    (line,) = (x for x in lines if "jaxpipe train" in x)
    words = shlex.split(line)
    return shlex.split(words[words.index("--command") + 1]) if "--command" in words else words


def config_of(settings: list[str]) -> Config:
    return load_config([], settings, presets=PRESETS)


def job_of(text: str) -> dict[str, Any]:
    (replicated,) = yaml.safe_load(text)["spec"]["replicatedJobs"]
    return replicated["template"]["spec"] | {"replicas": replicated["replicas"]}


def container_of(job: dict[str, Any]) -> dict[str, Any]:
    (container,) = job["template"]["spec"]["containers"]
    return container


@pytest.mark.parametrize(
    ("kind", "devices"),
    [("slurm", "h100:2x8"), ("jobset", "h100:2x8"), ("jobset", "v5p-16"), ("xpk", "v5p-16")],
)
def test_the_settings_in_a_file_are_those_that_were_given(
    kind: str, devices: str, tmp_path: Path, capsys
):
    file = tmp_path / "more.yml"
    file.write_text("trackers: [wandb]\nadam_b1: 0.8\n")
    given = [*TEXT, str(file), "emulate_devices=0"]
    slices = ["--num-slices", "2"] if devices == "v5p-16" else []
    more = slices if kind == "slurm" else [*IN_IMAGE, *slices]
    text = printed(kind, devices, *given, *more, capsys=capsys)
    words = container_of(job_of(text))["args"] if kind == "jobset" else command(text)
    if kind != "jobset":
        start = words.index("jaxpipe")
        assert words[start + 1] == "train"
        words = words[start + 2 :]
    expected = load_config([str(file)], [*SETTINGS, *TEXT], presets=PRESETS)
    changed = {"jax_cache_dir": "/shared/runs/.compiled"}
    changed |= {} if (kind, devices) == ("jobset", "h100:2x8") else {"distributed": True}
    assert config_of(words) == expected.model_copy(update=changed)


@pytest.mark.parametrize(
    ("devices", "slices", "pool", "chips"),
    [
        # Generation and topology as in GKE's table of node pools, and pods of a slice.
        ("v5p-16", 2, ("tpu-v5p-slice", "2x2x2", 2), 4),
        ("v6e:4x4", 2, ("tpu-v6e-slice", "4x4", 4), 4),
        ("v5e:2x4", 2, ("tpu-v5-lite-podslice", "2x4", 2), 4),
        ("tpu7x:2x2x1", 2, ("tpu7x", "2x2x1", 1), 4),
    ],
)
def test_a_jobset_for_tpus_has_a_job_for_each_slice(devices, slices, pool, chips, capsys):
    words = [*IN_IMAGE, "--num-slices", str(slices)]
    job = job_of(printed("jobset", devices, *words, capsys=capsys))
    selector = job["template"]["spec"]["nodeSelector"]
    assert (*selector.values(), job["parallelism"]) == pool
    assert job["replicas"] == slices and job["completions"] == job["parallelism"]
    assert container_of(job)["resources"]["limits"] == {"google.com/tpu": chips}
    assert "env" not in container_of(job)


def test_processes_of_a_jobset_for_gpus_are_told_where_the_first_is(capsys):
    job = job_of(printed("jobset", "gb200:2x8", *IN_IMAGE, "--max-restarts=5", capsys=capsys))
    container = container_of(job)
    assert (job["replicas"], job["parallelism"]) == (1, 4)  # hosts of a rack have 4
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    address, count, index = container["env"]
    assert address["value"] == "a-run-workers-0-0.a-run:55527" and count["value"] == "4"
    assert "job-completion-index" in index["valueFrom"]["fieldRef"]["fieldPath"]
    volume = container["volumeMounts"][0]
    assert volume["mountPath"] == "/shared/runs"


def run_script(
    script: str, folder: Path, srun: str, **variables: str
) -> subprocess.CompletedProcess:
    """Runs a batch script with another `srun`, and a `scontrol` that writes what it is given."""
    tools = {"srun": srun, "scontrol": f'#!/bin/bash\necho "$@" >> {folder}/scontrol.txt\n'}
    for name, text in tools.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"}
    return subprocess.run(
        ["bash", "-c", script], env=environment | variables, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("code", "restarts", "is_queued"),
    [(0, 0, False), (1, 0, True), (2, 0, False), (143, 2, True), (137, 3, False)],
)
def test_a_job_of_slurm_is_queued_again_unless_its_settings_are_wrong(
    code: int, restarts: int, is_queued: bool, tmp_path: Path, capsys
):
    script = printed("slurm", "h100:2x8", "--max-restarts=3", capsys=capsys)
    count = {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    done = run_script(script, tmp_path, f"#!/bin/bash\nexit {code}\n", **count)
    assert (done.returncode, done.stderr) == (code, "")
    queued = tmp_path / "scontrol.txt"
    assert queued.exists() == is_queued
    if is_queued:
        assert queued.read_text() == "requeue 12\n"


# Starts the tasks as `srun` does, and kills them once after step 3.
SRUN = """#!{python}
import os, pathlib, subprocess, sys, time
words = sys.argv[sys.argv.index("jaxpipe") + 1 :]
running = []
for task in "01":
    variables = dict(SLURM_STEP_NODELIST="localhost", SLURM_NTASKS="2", SLURM_PROCID=task)
    variables |= dict(SLURM_LOCALID="0", JAX_COORDINATOR_PORT="{port}")
    command = [sys.executable, "-m", "jaxpipe", *words]
    running.append(subprocess.Popen(command, env=os.environ | variables))
metrics = pathlib.Path("{metrics}")
while "SLURM_RESTART_COUNT" not in os.environ and running[0].poll() is None:
    if metrics.exists() and '"step": 3' in metrics.read_text():
        for popen in running:
            popen.kill()
    time.sleep(0.05)
codes = [popen.wait() for popen in running]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""


@pytest.mark.slow
def test_a_job_of_slurm_that_is_killed_goes_on_and_has_the_losses_of_one_process(
    tmp_path: Path, monkeypatch, capsys
):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("XLA_FLAGS")
    sizes = [*SMALL, "base_num_decoder_layers=4", "steps=6", "checkpoint_period=2"]
    plain = ["pipeline_engine=none", "per_device_batch_size=8", f"output_dir={tmp_path}/plain"]
    run_jaxpipe("train", *sizes, *plain)
    words = [*sizes, "dcn_pipeline_parallelism=2", "per_device_batch_size=4"]
    words += [f"output_dir={tmp_path}", "--devices=h100:2x1", "--max-restarts=2"]
    assert main(["launch", "--print", "slurm", *words]) == 0
    script = capsys.readouterr().out
    metrics = tmp_path / "default" / "metrics.jsonl"
    srun = SRUN.format(python=sys.executable, metrics=metrics, port=61_234)
    killed = run_script(script, tmp_path, srun)
    assert killed.returncode == 137, killed.stdout + killed.stderr
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 12\n"
    done = run_script(script, tmp_path, srun, SLURM_RESTART_COUNT="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "from the compile cache saved" in done.stdout  # the restart has found compiled programs
    np.testing.assert_allclose(losses(tmp_path), losses(tmp_path / "plain"), rtol=1e-5)


def hosts_of(jobset: str) -> dict[str, Any]:
    job = job_of(jobset)
    pod = job["template"]["spec"]
    names = ("nodeSelector", "hostNetwork", "tolerations", "terminationGracePeriodSeconds")
    return {
        "annotations": yaml.safe_load(jobset)["metadata"]["annotations"],
        "restarts": yaml.safe_load(jobset)["spec"]["failurePolicy"]["maxRestarts"],
        "limits": container_of(job)["resources"]["limits"],
        **{name: job[name] for name in ("replicas", "parallelism", "completions", "backoffLimit")},
        **{name: pod[name] for name in names},
    }


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("xpk"), reason="xpk makes the manifests: pip install xpk")
@pytest.mark.parametrize("devices", ["v5p-16", "v6e:4x4", "v5e:2x4", "tpu7x:2x2x1", "v4:2x2x4"])
def test_the_jobset_has_the_hosts_of_that_which_xpk_makes(devices: str, tmp_path: Path, capsys):
    words = [*IN_IMAGE, "--num-slices=2", r'text_separator="\n"', "dataset_type=text"]
    script = printed("xpk", devices, *words, capsys=capsys)
    dry = ["--dry-run", "--skip-validation", "--quiet", "--project", "p", "--zone", "us-central2-b"]
    done = subprocess.run(
        ["bash", "-c", script, "bash", *dry, f"--output-manifest-file={tmp_path}/jobset.yml"],
        env=os.environ | {"CLUSTER": "c"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    theirs = (tmp_path / "jobset.yml").read_text()
    ours = printed("jobset", devices, *words, capsys=capsys)
    assert hosts_of(ours) == hosts_of(theirs)
    lines = container_of(job_of(theirs))["command"][2].splitlines()
    (line,) = (line for line in lines if "jaxpipe train" in line)
    given = shlex.split(line[1 : line.rindex(")")])
    assert given == ["jaxpipe", "train", *container_of(job_of(ours))["args"]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--print", "slurm"], "`--print` needs `--devices`, such as v5p-64 or h100:4x8"),
        (["--print", "slurm", "--devices=v5p-16"], "slurm, which is for GPUs"),
        (["--print", "xpk", "--devices=h100:8"], "xpk, which is for TPUs"),
        (["--print", "jobset", "--devices=h100:2x8"], "needs `--image`, a container image"),
        (["--print", "slurm", "--devices=h100:2x8", *IN_IMAGE], "`--image` is given and `--print`"),
        (["--print", "slurm", "--devices=here"], "`--devices` is here, and the file is for a"),
        (["--print", "slurm", "--devices=h100:2x8", "--processes=2"], "each host has one process"),
        (["--print", "slurm", "--devices=h100:2x8", "output_dir=runs"], "Give the path at which"),
        (["--print", "slurm", "--devices=h100:2x8", "emulate_devices=8"], "`--print` decides"),
        (["--print", "slurm", "--devices=h100:1x4", "ici_fsdp_parallelism=8"], "and there are 4"),
        (
            ["--print", "jobset", "--devices=h100:2x8", "run_name=My_run", *IN_IMAGE],
            "`run_name` is 'My_run', and names in Kubernetes are of at most 46 lower-case letters",
        ),
        (["--devices=h100:2x8", "--processes=2"], "`--devices` is for `--print`, which is missing"),
        ([], "`--processes` is missing"),
    ],
)
def test_what_a_file_cannot_say_is_refused(words: list[str], message: str, capsys):
    assert main(["launch", *SETTINGS, *words]) == 2
    assert message in capsys.readouterr().err
