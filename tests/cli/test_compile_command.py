"""`jaxpipe compile` from the outside: on emulated devices, and for TPUs where libtpu is there."""

import json
import os
import subprocess
import sys

import pytest

from jaxpipe.cli import main

SETTINGS = [
    "emulate_devices=8",
    "ici_pipeline_parallelism=2",
    "ici_fsdp_parallelism=4",
    "dtype=float32",
    "base_emb_dim=16",
    "base_num_decoder_layers=4",
    "base_mlp_dim=32",
    "max_target_length=128",
    "num_pipeline_microbatches=4",
    "per_device_batch_size=2",
]

NO_LIBTPU = 'the TPU compiler is in libtpu: pip install "jaxpipe[aot]"'


def test_the_train_step_is_compiled_counted_and_dumped(tmp_path, capsys):
    assert main(["compile", *SETTINGS, "--json", "--dump-hlo", str(tmp_path / "new")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["platform"], report["num_devices"]) == ("cpu", 8)
    assert report["memory"]["argument_bytes"] > 0
    # Two repeats over two ranks: 4 x 2 + 1 ticks, forward and backward, each hands over.
    assert report["totals"]["collective-permute"]["executions"] >= 2 * 9
    assert all(loop["trips"] > 1 for loop in report["audit"]["loops"])
    (dump,) = (tmp_path / "new").iterdir()
    assert dump.name == "llama-tiny-this-machine-train-step.hlo"
    assert dump.read_text().startswith("HloModule jit_step")


def test_without_json_it_is_a_table(capsys):
    assert main(["compile", *SETTINGS, "base_num_decoder_layers=2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("llama-tiny: ")
    assert "engine circular on stage 2 x fsdp 4: 1 repeat(s) x 2 rank(s) x 1 layer(s)" in text
    assert "memory per device      MB" in text
    assert "collective-permute" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stepz=3"], "sets `stepz`, which is no key. Did you mean `steps`?"),
        (["--num-slices", "2"], "`--num-slices` is 2 without `--devices`. Give both."),
        (["emulate_devices=8", "--topology", "v5p:2x2x1"], "Leave one of them out."),
        (["emulate_devices=8", "--devices", "v5p-8"], "and `--devices` v5p:2x2x1. Leave one"),
        (["--devices", "v5p8"], "`devices` is 'v5p8' and `num_slices` 1. Give an accelerator"),
        (["ici_pipeline_parallelism=16"], "needs 16 devices and there are 8"),
    ],
)
def test_wrong_arguments_give_one_message_and_exit_code_2(arguments, message, capsys):
    assert main(["compile", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxpipe: error: ")
    assert message in error


def test_a_folder_that_cannot_be_written_is_refused_before_anything_compiles(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["compile", *SETTINGS, "--dump-hlo", str(tmp_path / "file")]) == 2
    error = capsys.readouterr().err
    assert "`--dump-hlo` is" in error
    assert "Give a folder of your own." in error


def on_tpus(*arguments: str) -> subprocess.CompletedProcess:
    """Another process: this one has emulated devices already."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return subprocess.run(
        [sys.executable, "-m", "jaxpipe", "compile", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.slow
def test_a_pipeline_is_compiled_for_tpus_that_are_not_there(tmp_path):
    pytest.importorskip(
        "libtpu", reason='the TPU compiler is in libtpu: pip install "jaxpipe[aot]"'
    )
    sizes = ("ici_pipeline_parallelism=2", "ici_fsdp_parallelism=2")
    dump = ("--dump-hlo", str(tmp_path))
    done = on_tpus(*sizes, "--devices", "v5p:2x2x1", "--json", *dump)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""  # libtpu does not know this machine, and is not heard
    report = json.loads(done.stdout)
    assert (report["platform"], report["num_devices"]) == ("TPU v5", 4)
    assert report["totals"]["collective-permute"]["asynchronous_bytes"] > 0
    assert report["totals"]["reduce-scatter"]["result_bytes"] > 0
    assert not report["uncounted_loops"]
    assert (tmp_path / "llama-tiny-v5p-2x2x1-train-step.hlo").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "v9p:2x2x1"], "libtpu does not take the topology 'v9p:2x2x1'"),
        (["--devices", "v5p:2x2x1", "ici_fsdp_parallelism=8"], "needs 8 devices and there are 4"),
    ],
)
def test_wrong_topologies_give_one_message(arguments, message):
    pytest.importorskip(
        "libtpu", reason='the TPU compiler is in libtpu: pip install "jaxpipe[aot]"'
    )
    done = on_tpus(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
