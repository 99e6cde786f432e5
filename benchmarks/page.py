"""Writes docs/benchmarks.md: what the scripts of this folder print, with date and versions.

    pip install "jaxpipe[train,flax]"   # and, if you like, jaxpipe[aot] and torch
    python benchmarks/page.py [NAME ...]

Runs all scripts whose packages are installed, or those named, one after the other, and writes the
page after each. The sections of the others stay as they are. All of them together take an hour and
a half on two cores, most of it XLA:TPU; what is timed needs a machine with nothing else to do.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax

import jaxpipe

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"


class Benchmark(NamedTuple):
    """A section of the page.

    Attributes:
        title: Its heading.
        script: The file in this folder.
        arguments: Its arguments.
        packages: Packages without which it cannot run.
        is_timed: Whether its figures need a machine with nothing else to do.
        text: What it compares.
        also: Packages that add to what it compares.
        needs_gpu: Whether it runs on a GPU alone.
    """

    title: str
    script: str
    arguments: tuple[str, ...]
    packages: tuple[str, ...]
    is_timed: bool
    text: str
    also: tuple[str, ...] = ()
    needs_gpu: bool = False


BENCHMARKS = {
    "bubbles": Benchmark(
        "Bubbles beside published ones",
        "bubbles.py",
        (),
        (),
        False,
        """\
Schedules in the simulator beside the closed forms of their papers, for 8 ranks and 32 microbatches:
the bubble of the `whole` step and the most that one rank waits between its own start and end, in
forwards of a whole rank, and the `peak` of activations, in those of a microbatch on a whole rank.
DualPipe stores two copies of the weights. Below are the fractions of a step in which ranks wait, by
the profiles of Zero Bubble ([Qi et al., 2023](https://arxiv.org/abs/2401.10241)): in the paper,
and simulated from its profiles. [Predictions and measurements](predictions.md) has times.""",
    ),
    "memory": Benchmark(
        "Memory, cycles and collectives beside MaxText's",
        "tpu_memory.py",
        (
            *("FSDP", "M = 4", "A", "C", "C delayed", "C per repeat"),
            *("C 4 layers", "C 4 layers, layers"),
            *("1F1B once", "1F1B per layer"),
            *("BFS windows", "BFS windows, layers", "BFS windows, v = 16"),
        ),
        ("jax", "jaxlib", "libtpu"),
        False,
        """\
One training step of llama2-7b, 48 sequences of 2,048 tokens, compiled by XLA:TPU for four v5p
chips. `FSDP` and `M = 4` have no pipeline; A and C are MaxText's circular pipeline over 2 ranks
with weights gathered once, in every tick (with hand-overs that are delayed, too) and per repeat;
1F1B and looped BFS are schedules in one program. Stages have one layer in A and C, 16 in 1F1B, and
two in BFS, which computes forwards twice again, or once (`layers`), or has 16 stages of one. Steps
are compiled with the
[default flags](compile.md#which-flags-is-a-step-compiled-with). `busy` adds the compiler's
estimates of cycles, `exposed` is what the played program waits for collectives, and `step` is their
sum, without bubbles and kernels. MaxText's peaks and seconds are for jax 0.11.2 and libtpu 0.0.48.1
with collectives on SparseCores, of FSDP and C with more scoped vector memory too; its GB are for
libtpu 0.0.51. The last column is what was to be reached.""",
    ),
    "long": Benchmark(
        "Long sequences",
        "long_sequences.py",
        (),
        ("jax", "jaxlib", "libtpu"),
        False,
        """\
Llama 3 on sequences of up to 131,072 tokens that `context` (cp) [divides](long-sequences.md),
compiled for v5p: GB and seconds per chip of one step, full rematerialization. XLA has no estimate
for kernels: `attention` counts their products at half of the peak. In brackets is what `jaxpipe
plan` says without compiling. The pipeline runs four ticks with a forward, also where a rank waits,
and three with a backward: `step` leaves out the one in which a rank waits, with which it is about
7.0 s, and the plan has it. Nothing ran on a device.""",
    ),
    "long-maxtext": Benchmark(
        "Long sequences beside MaxText's",
        "long_sequences.py",
        ("--beside-maxtext",),
        ("jax", "jaxlib", "libtpu"),
        False,
        """\
llama3-8b on 16 v5p chips: 262,144 tokens in sequences of 16,384 or 32,768 (`32k`), which `context`
divides and balances in both, with full rematerialization. Both are compiled with libtpu's own flags
and, in the last row, with our [default flags](compile.md#which-flags-is-a-step-compiled-with). In
brackets are MaxText's, at commit e591f30c, with the same jax and libtpu; the script says how they
were read. Gathers of MaxText's weights are parts of its products, so that less is exposed. The
kernels, splash in both, are left out. Nothing ran on a device.""",
    ),
    "long-gpus": Benchmark(
        "Long sequences on GPUs",
        "long_sequences.py",
        ("--gpus",),
        ("jax", "jaxlib", "jax_cuda12_plugin"),
        False,
        """\
Llama 3 compiled by XLA:GPU for H100s, without one: the attention is cuDNN's, on slices with masks
of parts of the queries. Without a GPU XLA:GPU does not know the memory that cuDNN works in, which
is added to the peak. These rows are from before `compile` had a roofline of GPUs. `GB` are results
of collectives, of a step and GPU: all-gather, reduce-scatter, all-reduce, all-to-all. In brackets
is what `jaxpipe plan` says. Nothing ran on a device.""",
    ),
    "own-llama": Benchmark(
        "A model of one's own beside the trainer's",
        "own_llama.py",
        (),
        ("jax", "jaxlib", "libtpu", "optax"),
        False,
        """\
One training step of llama2-7b on four v5p chips, as above: of functions that a user would write and
`jaxpipe.pipeline`, and of `jaxpipe train`, with the same options. Both are circular pipelines over
two ranks with stages of one layer: with defaults (C); with gathers per layer, delayed hand-overs,
the loss by vocabulary and inputs of layers in the host's memory; and with gathers once, delay, the
loss by vocabulary and ZeRO-1. Nothing ran on a device.""",
    ),
    "kinds": Benchmark(
        "Layers that differ",
        "kinds.py",
        (),
        ("jax", "jaxlib", "flax", "equinox"),
        False,
        """\
Small models whose layers [differ](several-kinds.md), on four ranks under 1F1B. With `mpmd` a rank
stores the layers that it runs, and hands over what x is there. In one program it has room for the
most layers of each kind that a stage has, and x is as large as the largest. Weights are those of
the fullest rank, peaks what `pipe.memory` says; XLA's is that of the compiled program, and
`measured` what is alive on a device while a step of Adam runs, with XLA's share of the program that
runs then. That is up to 1.85 times what is said: of models as small as these, what XLA:CPU computes
in and gradients that ranks share weigh as much as layers.""",
    ),
    "mixture": Benchmark(
        "A mixture of experts on GPUs",
        "mixture.py",
        ("gpus",),
        ("jax", "jaxlib", "equinox", "jax_cuda12_plugin"),
        False,
        """\
[An Equinox mixture of experts](tutorials/equinox-mixture.md) at sizes that Marin publishes, as one
program, compiled by XLA:GPU for H100s, without one, with muon unless a row says adamw. `6.1B` and
`40B` are their names. Without a GPU XLA:GPU does not know the memory that cuDNN works in. Times are
a roofline of the program: `busy` without `kernels`, `exposed` what the played program waits for
collectives, `bubble` by the schedule's timeline. Devices have room for 1.25 times the mean of
tokens but in the rows that drop none. Nothing ran on a device; what Marin measured did.""",
    ),
    "mixture-tpus": Benchmark(
        "A mixture of experts on TPUs",
        "mixture.py",
        ("tpus",),
        ("jax", "jaxlib", "equinox", "libtpu"),
        False,
        """\
The same on four slices of eight v6e chips, each slice a rank with eight shards of the experts, with
libtpu's own flags. `busy` adds the compiler's estimates of cycles, `kernels` the products of
attention and experts at half of the peak, if experts have as many tokens each, and `bubble` is by
the schedule's timeline. `hidden` is the share of the time of transfers beside which a chip
computes. Nothing ran on a device.""",
    ),
    "mixture-plans": Benchmark(
        "Plans for a mixture of experts",
        "mixture.py",
        ("plans",),
        ("jax", "jaxlib", "equinox"),
        False,
        """\
What `jaxpipe.plan` says of these models: as models of one's own, with room for 1.25 times the mean
of tokens in 67B, and of the trainer's that is most like them, with any layout and with that of the
rows above. Nothing ran on a device.""",
    ),
    "gpus": Benchmark(
        "GPUs that are not there",
        "gpu_memory.py",
        (),
        ("jax", "jaxlib", "jax_cuda12_plugin"),
        False,
        """\
Train steps compiled by XLA:GPU for H100s, on sequences of 4,096 tokens, four on each GPU (70B:
two), with full rematerialization. `busy` is a [roofline](compile.md#what-the-columns-mean) of what
XLA scheduled, `exposed` what a GPU waits for collectives while the program is played, through
NVLink or, between hosts, adapters of 400 Gb/s; `hidden` is the share of their time in which it does
not wait: all-gathers, reduce-scatters, all-reduces, permutes, all. Nothing ran on these devices; a
step on an H200 took 1.1 to 1.3 times its roofline.""",
    ),
    "gpu": Benchmark(
        "One GPU",
        "gpu.py",
        (),
        ("jax", "jaxlib"),
        True,
        """\
Kernels and train steps that ran on one NVIDIA H200. Below, forwards with their backward in
bfloat16: attention of our three kernels, and products of rows grouped by expert. `ValueError`: the
kernel does not compute that; `JaxRuntimeError`: it ran out of memory. Then steps of `jaxpipe train`
on 16,384 tokens, beside what `jaxpipe plan` says of the same keys. Of the peaks, XLA without a GPU
says 27.06 GB of `M 4`, 24.07 of `circular`, 34.10 of `scheduled` and 42.14 of deepseek2, within 1%
of what was in use, but 23.67 of `full`, 34.82 of `minimal_with_context`, 46.93 of 8B and 25.88 of
gemma3. The peak is that of the process, in which XLA also tries kernels, presumably the difference.
Heads of 192 and 256 channels were given to cuDNN in a run of their own; the steps ran without.
`planned` is what plans said before they knew these figures. What they and `jaxpipe compile` take of
them is in `jaxpipe.devices`: `cudnn_attention`, `PALLAS_ATTENTION` and `GROUPED_PRODUCTS`. One
rank of `scheduled` computes a whole stage again, the last product of each layer too, which the
plain step leaves out: by the roofline that is 11 of its 43 ms more, and copies of what the stage
keeps 15.""",
        needs_gpu=True,
    ),
    "dispatch": Benchmark(
        "Dispatch beside JaxPP's",
        "dispatch.py",
        (),
        ("jax", "jaxlib"),
        True,
        """\
What a task of the MPMD engine costs beyond its arithmetic, beside what JAX alone needs. JaxPP was
measured once, in November 2026, on another machine with two cores.""",
    ),
    "start-up": Benchmark(
        "Start-up beside JaxPP's",
        "tutorial.py",
        (),
        ("jax", "jaxlib", "flax"),
        True,
        """\
A small transformer as programs of four groups, beside one plain program. JaxPP was measured once,
in November 2026, on another machine with two cores.""",
    ),
    "efficiency": Benchmark(
        "Efficiency beside torch's",
        "efficiency.py",
        (),
        ("jax", "jaxlib"),
        True,
        """\
The same blocks in two processes with a core each, by the MPMD engine and by
torch.distributed.pipelining, if torch is installed. 1.00 is what the schedule allows; "of
1+1" leaves out what two processes cost each other that know nothing of each other.""",
        ("torch",),
    ),
    "simulated": Benchmark(
        "Two processes beside the simulator",
        "pipeline.py",
        (),
        ("jax", "jaxlib"),
        True,
        "The measured time of a step, beside what the simulator says from the times of its tasks.",
    ),
    "scheduled": Benchmark(
        "Schedules in one program",
        "scheduled.py",
        (),
        ("jax", "jaxlib"),
        True,
        """\
The work of a step of every engine, beside that of the same functions one after the other. What
`circular` takes beyond the least is most of all that it computes in its bubbles, too. What a row
takes more of time than of CPU time is waiting: at every tick all eight devices meet.""",
    ),
    "lora": Benchmark(
        "LoRA",
        "lora.py",
        (),
        ("jax", "jaxlib"),
        True,
        "LoRA beside full training: ratios to full training under 1F1B. [How to](lora.md).",
    ),
    "loop": Benchmark(
        "The trainer's loop",
        "loop.py",
        (),
        ("jax", "jaxlib"),
        True,
        "What data, metrics, logs and checkpoints cost beyond the compiled step.",
    ),
    "planning": Benchmark(
        "Planning",
        "planning.py",
        (),
        (),
        True,
        "CPU seconds and memory of building, checking, simulating and searching schedules.",
    ),
    "plans": Benchmark(
        "Plans",
        "plans.py",
        (),
        ("jax", "jaxlib"),
        True,
        """\
What `jaxpipe plan` answers to requests of the shape that teams have: the CPU seconds that it took,
and its first plan, with the predicted time, memory and MFU. [Predictions and
measurements](predictions.md) says how far off such times are.""",
    ),
    "recipes": Benchmark(
        "Plans beside recipes",
        "plans.py",
        ("--recipes",),
        ("jax", "jaxlib"),
        False,
        """\
Layouts that others publish: their seconds, what our planner predicts for such a layout of our own
engines, and for its own first plan. Rows in 8 bits are predicted in bfloat16, so that layouts can
be compared and seconds cannot; `none` is a layout that does not fit, or that engines refuse.""",
    ),
    "optimizers": Benchmark(
        "What muon gathers",
        "optimizer_gathers.py",
        (),
        ("jax", "jaxlib", "libtpu"),
        False,
        """\
Bytes that collectives of the optimizer's part of a step move, by XLA:TPU's program: muon
orthogonalises whole matrices, which FSDP divides and a pipeline does not.""",
    ),
}

HEAD = """\
# Benchmarks

What the scripts in [benchmarks](../benchmarks) print. `make benchmarks` runs them and writes this
page; `make benchmarks NAMES="bubbles dispatch"` renews some sections. Nobody types a figure here:
every section has the command, the date and the versions that it is from.
"""
NOT_RUN = """\
## Not run for this page

Times need a machine with nothing else to do, and the TPU's compiler needs libtpu.

| section | command |
|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="writes docs/benchmarks.md")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    names = parser.parse_args().names
    if unknown := sorted(set(names) - set(BENCHMARKS)):
        parser.error(f"NAME is {', '.join(unknown)}. Give some of {', '.join(BENCHMARKS)}.")
    for name in names or BENCHMARKS:
        missing = [p for p in BENCHMARKS[name].packages if importlib.util.find_spec(p) is None]
        if BENCHMARKS[name].needs_gpu and jax.default_backend() != "gpu":
            missing.append("a GPU")
        if missing and not names:
            print(f"{name}: needs {', '.join(missing)}", flush=True)
            continue
        print(f"{name}: {command(BENCHMARKS[name])}", flush=True)
        found = result(BENCHMARKS[name])
        PAGE.write_text(page(written() | {name: found}))  # others may have written meanwhile


def command(benchmark: Benchmark) -> str:
    """Returns how a user runs a benchmark."""
    return shlex.join(["python", f"benchmarks/{benchmark.script}", *benchmark.arguments])


def result(benchmark: Benchmark) -> str:
    """Runs a benchmark. Returns when and with what it ran, and what it printed."""
    script = [sys.executable, f"benchmarks/{benchmark.script}", *benchmark.arguments]
    folders = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command(benchmark)} failed:\n{done.stderr}")
    return f"{_circumstances(benchmark)}\n\n```text\n{done.stdout.strip()}\n```"


def _circumstances(benchmark: Benchmark) -> str:
    """Returns the date, the versions, and of what is timed the machine."""
    version = importlib.metadata.version
    optional = [name for name in benchmark.also if importlib.util.find_spec(name)]
    packages = [f"{name} {version(name)}" for name in (*benchmark.packages, *optional)]
    machine = [f"{os.cpu_count()} cores, {platform.machine()}"] if benchmark.is_timed else []
    today = f"{datetime.date.today():%Y-%m-%d}"
    ours = [f"jaxpipe {jaxpipe.__version__}", f"Python {platform.python_version()}"]
    return f"*{', '.join([today, *ours, *packages, *machine])}*"


def written() -> dict[str, str]:
    """Returns the results on the page, by the name of their benchmark."""
    if not PAGE.exists():
        return {}
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    by_title = {section.split("\n", 1)[0]: section for section in sections}
    found = {name: by_title.get(b.title, "") for name, b in BENCHMARKS.items()}
    results = {name: re.search(r"^\*\d.*?^```$", s, re.M | re.S) for name, s in found.items()}
    return {name: match[0] for name, match in results.items() if match}


def page(results: dict[str, str]) -> str:
    """Returns the text of the page."""
    sections = [
        f"## {b.title}\n\n{b.text}\n\n    {command(b)}\n\n{results[name]}\n"
        for name, b in BENCHMARKS.items()
        if name in results
    ]
    rows = [f"| {b.title} | `{command(b)}` |" for n, b in BENCHMARKS.items() if n not in results]
    return "\n".join([HEAD, *sections, *([NOT_RUN + "\n".join(rows) + "\n"] if rows else [])])


if __name__ == "__main__":
    main()
