"""Memory, time and communication of llama2-7b on a v5p-8, as the TPU's compiler reports them.

    pip install "jaxpipe[train,aot]"
    python benchmarks/tpu_memory.py [--compile-seconds] [row ...]

Compiles the real train step of every row for four chips that are not there, one row after the
other: about a minute each on two cores. Beside ours stand MaxText's figures for the same model,
batch and dtypes, measured with jax 0.11.2 and libtpu 0.0.51, and what we set out to reach. `busy`
is the sum of the compiler's own estimates of cycles, without kernels, collectives and bubbles;
`step` has these too.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator

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
PER_LAYER = {"pipeline_fsdp_ag_per_layer": True}
ONE_F_ONE_B = {"pipeline_engine": "scheduled", "pipeline_schedule": "1f1b"}
LOOPED_BFS = ONE_F_ONE_B | {"pipeline_schedule": "looped_bfs", "num_pipeline_repeats": 8}
ON_SPARSE_CORES = "--xla_tpu_enable_sparse_core_collective_offload_all_gather=true"
ZERO_1 = {
    "ici_data_parallelism": 2,
    "ici_fsdp_parallelism": 1,
    "shard_optimizer_over_data": True,
}

# name: (settings, MaxText's row, our target)
ROWS: dict[str, tuple[dict, str, str]] = {
    "FSDP": (
        {"pipeline_engine": "none", "num_pipeline_microbatches": 1},
        "40272 3.71 | 26.2 13.2 0 0.4 0",
        "3.72 s",
    ),
    # The yardstick: the microbatches of the pipelines below, without one.
    "M = 4": ({"pipeline_engine": "none", "num_pipeline_microbatches": 4}, "", ""),
    "A": (
        TWO_RANKS | ONCE,
        "48612 4.55 | 7.0 0.3 6.9 40.1 45.4",
        "42500 4.15 s | 30: A2A 1.5, CP 15",
    ),
    "A explicit": (TWO_RANKS | ONCE | {"shard_mode": "explicit"}, "does not trace", "as A"),
    "B": (TWO_RANKS | ONCE | ZERO_1, "69958 | 14.0 0.3 6.9 26.7 51.9", ""),
    "C": (TWO_RANKS, "39394 4.21 | 105.0 52.7 0.4 1.2 39.1", "39400 4.05 s"),
    "C per repeat": (
        TWO_RANKS | PER_REPEAT,
        "49329 5.33 | 13.5 6.8 4.1 1.2 38.9",
        "39000 4.15 s | 36: AG 14, RS 7, CP 15",
    ),
    "C asynchronous": (
        TWO_RANKS | PER_REPEAT | {"compile_xla_flags": ON_SPARSE_CORES},
        "as C per repeat",
        "gathers overlap",
    ),
    "C 4 layers": (
        TWO_RANKS | BOTH | {"num_layers_per_pipeline_stage": 4},
        "42226 | 107.4 54.0 0.4 1.2 10.1",
        "",
    ),
    "GPipe": (
        TWO_RANKS | ONCE | BOTH | {"num_layers_per_pipeline_stage": 16},
        "96602 | 7.0 0.3 44.2 1.2 1.8",
        "",
    ),
    "1F1B once": (TWO_RANKS | ONCE | LAYERS | ONE_F_ONE_B, "none", "44000 4.15 s | all 20"),
    "1F1B once, both": (TWO_RANKS | ONCE | BOTH | ONE_F_ONE_B, "none", ""),
    "1F1B per layer": (TWO_RANKS | PER_LAYER | LAYERS | ONE_F_ONE_B, "none", "34000 4.15 s"),
    "1F1B per layer, both": (TWO_RANKS | PER_LAYER | BOTH | ONE_F_ONE_B, "none", ""),
    "BFS windows": (
        TWO_RANKS | PER_REPEAT | BOTH | LOOPED_BFS,
        "none",
        "38000 4.30 s | all 35",
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
    args = parser.parse_args()
    names = args.rows
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        parser.error(f"{unknown} are no rows. Rows are {', '.join(ROWS)}.")
    print("MB (1e6 bytes) per chip; GB of results per step and chip: all-gather, reduce-scatter,")
    print("all-reduce, all-to-all, collective-permute; async: of AG; seconds of a step and chip")
    for line in table(names, with_seconds=args.compile_seconds):
        print(line, flush=True)


def table(names: list[str], *, with_seconds: bool) -> Iterator[str]:
    compiling = f"{'compile':>8}" if with_seconds else ""
    yield (
        f"{'row':<21}{'args':>7}{'temp':>7}{'peak':>7} | {'GB AG / RS / AR / A2A / CP':<28} "
        f"{'async':>6}{'busy':>6}{'step':>6}{compiling}  {'MaxText: peak, s | GB':<34} "
        "target: peak, s | GB at most"
    )
    for name in names:
        settings, peer, target = ROWS[name]
        report = compile_row(COMMON | settings)
        memory, totals = report["memory"], report["totals"]
        moved = " ".join(f"{gigabytes(totals, kind):5.1f}" for kind in KINDS)
        sizes = "".join(
            f"{memory[f'{part}_bytes'] / 1e6:>7.0f}" for part in ("argument", "temp", "peak")
        )
        apart = gigabytes(totals, KINDS[0], "asynchronous_bytes")
        compiling = f"{report['compile_seconds']:>6.0f} s" if with_seconds else ""
        time = report["step_time"]
        busy = sum(s for work, s in time["busy_seconds"].items() if work != "kernels")
        yield (
            f"{name:<21}{sizes} | {moved:<28} {apart:>6.1f}{busy:>6.2f}{time['seconds']:>6.2f}"
            f"{compiling}  {peer:<34} {target}".rstrip()
        )
    yield f"jax {report['jax_version']}, libtpu {report['libtpu_version']}"


def gigabytes(totals: dict, kind: str, of: str = "result_bytes") -> float:
    return totals.get(kind, {of: 0})[of] / 1e9


def compile_row(settings: dict) -> dict:
    """The report of `jaxpipe compile` in a process of its own: a compiler's crash ends one row."""
    keys = [f"{key}={str(value).lower()}" for key, value in settings.items()]
    command = [sys.executable, "-m", "jaxpipe", "compile", *keys]
    command += ["--topology", "v5p:2x2x1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
