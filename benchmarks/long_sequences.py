"""Long sequences on TPUs: memory, time and communication, as the TPU's compiler reports them.

    pip install "jaxpipe[train,aot]"
    python benchmarks/long_sequences.py [--dump-hlo DIR] [row ...]

Compiles the real train step of every row for chips that are not there, one row after the other:
some minutes each on two cores. `busy` is the sum of the compiler's own estimates of cycles,
`exposed` what a chip waits for collectives, and `attention` what its kernels take at half of the
peak, for which the compiler has no estimate; `step` is their sum, without bubbles. In brackets is
what `jaxpipe plan` says of the same layout, which sees no compiled program.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tpu_memory import compile_row

LLAMA_8B = {
    "model_name": "llama3-8b",
    "pipeline_engine": "none",
    "num_pipeline_microbatches": 1,
}
ONE_FSDP = {"ici_fsdp_parallelism": 1}
# A pipeline of two ranks, each microbatch one sequence.
TWO_RANKS = {
    "pipeline_engine": "scheduled",
    "pipeline_schedule": "1f1b",
    "ici_pipeline_parallelism": 2,
    "num_pipeline_microbatches": 2,
    "pipeline_fsdp_ag_per_layer": True,
    "set_remat_policy_on_layers_per_stage": True,
    "set_remat_policy_on_pipeline_iterations": False,
}

# name: (topology, chips, sequences, tokens of each, settings)
ROWS: dict[str, tuple[str, int, int, int, dict]] = {
    "8B fsdp 4, cp 2": (
        "v5p:2x2x2",
        8,
        8,
        16384,
        LLAMA_8B | {"ici_fsdp_parallelism": 4, "ici_context_parallelism": 2},
    ),
    "8B cp 8": (
        "v5p:2x2x2",
        8,
        8,
        16384,
        LLAMA_8B | ONE_FSDP | {"ici_context_parallelism": 8},
    ),
    "8B cp 8, 2 x 32k": (
        "v5p:2x2x2",
        8,
        2,
        32768,
        LLAMA_8B | ONE_FSDP | {"ici_context_parallelism": 8},
    ),
    "8B fsdp 2, cp 32": (
        "v5p:4x4x4",
        64,
        2,
        131072,
        LLAMA_8B | {"ici_fsdp_parallelism": 2, "ici_context_parallelism": 32},
    ),
    "8B pp 2, cp 32": (
        "v5p:4x4x4",
        64,
        2,
        131072,
        LLAMA_8B | ONE_FSDP | TWO_RANKS | {"ici_context_parallelism": 32},
    ),
    "70B fsdp 16, cp 16": (
        "v5p:4x8x8",
        256,
        16,
        131072,
        LLAMA_8B
        | {
            "model_name": "llama3.1-70b",
            "ici_fsdp_parallelism": 16,
            "ici_context_parallelism": 16,
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="long sequences on TPUs, compiled ahead of time")
    parser.add_argument("rows", nargs="*", default=[*ROWS], help=f"of {', '.join(ROWS)}")
    parser.add_argument("--dump-hlo", type=Path, metavar="DIR", help="keep the programs in DIR")
    args = parser.parse_args()
    unknown = [name for name in args.rows if name not in ROWS]
    if unknown:
        parser.error(f"{unknown} are no rows. Rows are {', '.join(ROWS)}.")
    print("GB (1e9 bytes) and seconds of a step, per chip; (what `jaxpipe plan` says)")
    print(
        f"{'row':<20}{'chips':>6} {'batch':<12}{'peak':>7}{'':>8}{'busy':>7}{'exposed':>9}"
        f"{'attention':>11}{'step':>8}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in args.rows:
            print(line(name, args.dump_hlo or Path(folder)), flush=True)


def line(name: str, folder: Path) -> str:
    topology, chips, sequences, length, settings = ROWS[name]
    settings = settings | {
        "max_target_length": length,
        "per_device_batch_size": sequences / chips,
    }
    report, without_kernels = compile_row(settings, folder / name.replace(" ", "-"), topology)
    peak = report["memory"]["peak_bytes"] / 1e9
    attention = report["step_time"]["busy_seconds"]["kernels"]
    step = without_kernels.busy + without_kernels.exposed + attention
    predicted = plan(settings, topology, sequences)
    return (
        f"{name:<20}{chips:>6} {f'{sequences} x {length}':<12}{peak:>7.1f}"
        f"{f'({predicted[0]:.1f})':>8}{without_kernels.busy:>7.2f}{without_kernels.exposed:>9.2f}"
        f"{attention:>11.2f}{step:>8.2f} ({predicted[1]:.2f})"
    )


def plan(settings: dict, topology: str, sequences: int) -> tuple[float, float]:
    """Returns GB of the peak and seconds of a step that `jaxpipe plan` says of one layout."""
    fixed = {"ici_pipeline_parallelism": 1, "ici_tensor_parallelism": 1, "ici_fsdp_parallelism": 1}
    fixed |= {"remat_policy": "full", "num_vocab_tiling": 1} | settings
    length = fixed.pop("max_target_length")
    del fixed["per_device_batch_size"]
    keys = [f"{key}={str(value).lower()}" for key, value in fixed.items()]
    command = [sys.executable, "-m", "jaxpipe", "plan", "--devices", topology, "--json", *keys]
    command += ["--batch", str(sequences), "--sequence", str(length), "--top", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    (best,) = json.loads(done.stdout)["plans"]
    return best["memory_bytes"]["total"] / 1e9, best["step_seconds"]


if __name__ == "__main__":
    main()
