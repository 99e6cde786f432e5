"""Memory, time and communication of llama2-7b on a v5p-8, as the TPU's compiler reports them.

    pip install "jaxpipe[train,aot]"
    python benchmarks/tpu_memory.py [--compile-seconds] [--dump-hlo DIR] [row ...]

Compiles the real train step of every row for four chips that are not there, one row after the
other: some minutes each on two cores. `busy` is the sum of the compiler's own estimates of cycles,
`exposed` what the chip waits for collectives, and `step` their sum, without bubbles and kernels,
which have no estimate. Beside ours stand MaxText's figures for the same model, batch and dtypes:
peak and seconds of the step and exposed with jax 0.11.2 and libtpu 0.0.48.1 under flags like ours,
GB with libtpu 0.0.51. The last column is what we set out to reach.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from jaxpipe.xla.step_time import StepTime, device_rates, step_time

COMMON = {
    "model_name": "llama2-7b",
    "max_target_length": 2048,
    "per_device_batch_size": 12,
}
TWO_RANKS = {"ici_pipeline_parallelism": 2, "num_pipeline_microbatches": 8}
PER_REPEAT = {"pipeline_fsdp_ag_per_repeat": True}
ONCE = {"pipeline_fsdp_ag_once": True}
# Of several layers in a stage, the backward computes one at a time again.
BOTH = {"set_remat_policy_on_layers_per_stage": True}
# Of layers alone: a stage is not computed a second time before its layers are.
LAYERS = BOTH | {"set_remat_policy_on_pipeline_iterations": False}
DELAYED = {"pipeline_delay_activation_forwarding": True}
PER_LAYER = {"pipeline_fsdp_ag_per_layer": True}
ONE_F_ONE_B = {"pipeline_engine": "scheduled", "pipeline_schedule": "1f1b"}
ZB_H1 = ONE_F_ONE_B | {"pipeline_schedule": "zero_bubble_h1"}
LOOPED_BFS = ONE_F_ONE_B | {"pipeline_schedule": "looped_bfs", "num_pipeline_repeats": 8}
ZERO_1 = {
    "ici_data_parallelism": 2,
    "ici_fsdp_parallelism": 1,
    "shard_optimizer_over_data": True,
}

# name: (settings, MaxText's row, our target)
ROWS: dict[str, tuple[dict, str, str]] = {
    "FSDP": (
        {"pipeline_engine": "none", "num_pipeline_microbatches": 1},
        "41393 3.13 0.00 | 26.2 13.2 0 0.4 0",
        "42000 2.98 s",
    ),
    # The yardstick: the microbatches of the pipelines below, without one.
    "M = 4": ({"pipeline_engine": "none", "num_pipeline_microbatches": 4}, "", "41300 3.16 s"),
    "A": (
        TWO_RANKS | ONCE,
        "50357 5.07 0.50 | 7.0 0.3 6.9 40.1 45.4",
        "41600 3.38 s | 30: A2A 1.5, CP 15",
    ),
    "A explicit": (TWO_RANKS | ONCE | {"shard_mode": "explicit"}, "does not trace", "as A"),
    "B": (TWO_RANKS | ONCE | ZERO_1, "69958 | 14.0 0.3 6.9 26.7 51.9", ""),
    "C": (TWO_RANKS, "40997 3.85 0.17 | 105.0 52.7 0.4 1.2 39.1", "34500 3.33 s"),
    # A result is sent while the next tick computes, and arrives one tick later.
    "C delayed": (TWO_RANKS | DELAYED, "", "as C"),
    "C per repeat": (
        TWO_RANKS | PER_REPEAT,
        "49641 5.49 0.21 | 13.5 6.8 4.1 1.2 38.9",
        "37500 3.38 s | 36: AG 14, RS 7, CP 15",
    ),
    "C 4 layers": (
        TWO_RANKS | BOTH | {"num_layers_per_pipeline_stage": 4},
        "42226 | 107.4 54.0 0.4 1.2 10.1",
        "",
    ),
    "C 4 layers, layers": (
        TWO_RANKS | LAYERS | {"num_layers_per_pipeline_stage": 4},
        "",
        "",
    ),
    "GPipe": (
        TWO_RANKS | ONCE | BOTH | {"num_layers_per_pipeline_stage": 16},
        "96602 | 7.0 0.3 44.2 1.2 1.8",
        "",
    ),
    "1F1B once": (TWO_RANKS | ONCE | LAYERS | ONE_F_ONE_B, "none", "44000 3.42 s | all 20"),
    "1F1B once, both": (TWO_RANKS | ONCE | BOTH | ONE_F_ONE_B, "none", ""),
    "1F1B per layer": (TWO_RANKS | PER_LAYER | LAYERS | ONE_F_ONE_B, "none", "33600 3.38 s"),
    "ZB-H1 per layer": (TWO_RANKS | PER_LAYER | LAYERS | ZB_H1, "none", ""),
    "1F1B per layer, both": (TWO_RANKS | PER_LAYER | BOTH | ONE_F_ONE_B, "none", ""),
    "BFS windows": (
        TWO_RANKS | PER_REPEAT | BOTH | LOOPED_BFS,
        "none",
        "38000 3.60 s | all 35",
    ),
    "BFS windows, layers": (TWO_RANKS | PER_REPEAT | LAYERS | LOOPED_BFS, "none", ""),
    "BFS windows, v = 16": (
        TWO_RANKS | PER_REPEAT | LOOPED_BFS | {"num_pipeline_repeats": 16},
        "none",
        "",
    ),
}
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


def main() -> None:
    parser = argparse.ArgumentParser(description="llama2-7b on a v5p-8, compiled ahead of time")
    parser.add_argument("rows", nargs="*", default=[*ROWS], help=f"of {', '.join(ROWS)}")
    parser.add_argument("--compile-seconds", action="store_true", help="on a machine at rest")
    parser.add_argument("--dump-hlo", type=Path, metavar="DIR", help="keep the programs in DIR")
    args = parser.parse_args()
    names = args.rows
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        parser.error(f"{unknown} are no rows. Rows are {', '.join(ROWS)}.")
    print("MB (1e6 bytes) per chip; GB of results per step and chip: all-gather, reduce-scatter,")
    print("all-reduce, all-to-all, collective-permute; seconds of a step and chip without kernels")
    with tempfile.TemporaryDirectory() as folder:
        for line in table(names, args.dump_hlo or Path(folder), with_seconds=args.compile_seconds):
            print(line, flush=True)


def table(names: list[str], folder: Path, *, with_seconds: bool) -> Iterator[str]:
    compiling = f"{'compile':>8}" if with_seconds else ""
    yield (
        f"{'row':<21}{'args':>7}{'temp':>7}{'peak':>7} | {'GB AG / RS / AR / A2A / CP':<28} "
        f"{'busy':>6}{'exposed':>8}{'step':>6}{compiling}  {'MaxText: peak, s, exposed | GB':<40} "
        "target: peak, s | GB at most"
    )
    for name in names:
        settings, peer, target = ROWS[name]
        report, time = compile_row(COMMON | settings, folder / name.replace(" ", "-"))
        memory, totals = report["memory"], report["totals"]
        moved = " ".join(f"{gigabytes(totals, kind):5.1f}" for kind in KINDS)
        sizes = "".join(
            f"{memory[f'{part}_bytes'] / 1e6:>7.0f}" for part in ("argument", "temp", "peak")
        )
        compiling = f"{report['compile_seconds']:>6.0f} s" if with_seconds else ""
        yield (
            f"{name:<21}{sizes} | {moved:<28} {time.busy:>6.2f}{time.exposed:>8.2f}"
            f"{time.busy + time.exposed:>6.2f}{compiling}  {peer:<40} {target}".rstrip()
        )
    yield f"jax {report['jax_version']}, libtpu {report['libtpu_version']}"


def gigabytes(totals: dict, kind: str) -> float:
    return totals[kind]["result_bytes"] / 1e9 if kind in totals else 0.0


def compile_row(settings: dict, folder: Path, topology: str = "v5p:2x2x1") -> tuple[dict, StepTime]:
    """Returns the report of `jaxpipe compile`, and the time of a step whose kernels take none."""
    report = compile_report(settings, folder, topology)
    (program,) = folder.glob("*.hlo")
    return report, without_kernels(program, report["platform"])


def compile_report(settings: dict, folder: Path, topology: str) -> dict:
    """Compiles a row in a process of its own: a compiler's crash ends one row."""
    keys = [f"{key}={str(value).lower()}" for key, value in settings.items()]
    command = [sys.executable, "-m", "jaxpipe", "compile", *keys]
    command += ["--devices", topology, "--json", "--dump-hlo", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout)


def without_kernels(program: Path, platform: str) -> StepTime:
    """Plays a program of XLA:TPU, whose kernels have no estimate."""
    rates = device_rates(platform)
    assert rates is not None
    text = program.read_text(encoding="utf-8")
    return step_time(text, replace(rates, peak_tflops=math.inf))


if __name__ == "__main__":
    main()
