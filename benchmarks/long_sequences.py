"""Long sequences: memory, time and communication, as the compilers of TPUs and GPUs report them.

    pip install "jaxpipe[train,aot]"
    python benchmarks/long_sequences.py [--dump-hlo DIR] [row ...]

    pip install "jaxpipe[train,aot-gpu]"
    JAX_PLATFORMS=cpu python benchmarks/long_sequences.py --gpus [--dump-hlo DIR]

    python benchmarks/long_sequences.py --beside-maxtext [--dump-hlo DIR]

Compiles the real train step of every row for chips that are not there, one row after the other:
some minutes each on two cores. `busy` is the sum of the compiler's own estimates of cycles,
`exposed` what a chip waits for collectives, and `attention` what its kernels take at half of the
peak, for which the compiler has no estimate; `step` is their sum, without bubbles. In brackets is
what `jaxpipe plan` says of the same layout, which sees no compiled program. XLA:GPU has no
estimates of cycles: of GPUs the peak is printed, and what is sent.

MaxText's figures are of its `train_compile` with jax 0.11.2 and libtpu 0.0.48.1, at commit
e591f30c of 2026-08-22: base.yml with `model_name=llama3-8b compile_topology=v5p-32
compile_topology_num_slices=1`, the layout of the row and, of `flags`, what `jaxpipe compile
--print-flags` sets as `compile_xla_flags`. `peak_memory_in_bytes` of the compiled step is its peak,
and `jaxpipe.xla.step_time` reads its text as it reads ours.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tpu_memory import compile_report, compile_row, gigabytes

LLAMA_8B = {
    "model_name": "llama3-8b",
    "pipeline_engine": "none",
    "num_pipeline_microbatches": 1,
}
ONE_FSDP = {"ici_fsdp_parallelism": 1}
# A pipeline of two ranks, each microbatch one sequence.
TWO_RANKS = {
    "pipeline_vocab_parallel": False,
    "pipeline_engine": "scheduled",
    "pipeline_schedule": "1f1b",
    "ici_pipeline_parallelism": 2,
    "num_pipeline_microbatches": 2,
    "pipeline_fsdp_ag_per_layer": True,
    "set_remat_policy_on_layers_per_stage": True,
    "set_remat_policy_on_pipeline_iterations": False,
}


class Row(NamedTuple):
    """What is compiled: for which devices, and how many sequences of how many tokens."""

    topology: str
    devices: int
    sequences: int
    length: int
    layout: dict

    @property
    def settings(self) -> dict:
        return self.layout | {
            "max_target_length": self.length,
            "per_device_batch_size": self.sequences / self.devices,
        }


ROWS = {
    "8B fsdp 4, cp 2": Row(
        "v5p:2x2x2",
        8,
        8,
        16384,
        LLAMA_8B | {"ici_fsdp_parallelism": 4, "ici_context_parallelism": 2},
    ),
    "8B cp 8": Row(
        "v5p:2x2x2",
        8,
        8,
        16384,
        LLAMA_8B | ONE_FSDP | {"ici_context_parallelism": 8},
    ),
    "8B cp 8, 2 x 32k": Row(
        "v5p:2x2x2",
        8,
        2,
        32768,
        LLAMA_8B | ONE_FSDP | {"ici_context_parallelism": 8},
    ),
    "8B fsdp 2, cp 32": Row(
        "v5p:4x4x4",
        64,
        2,
        131072,
        LLAMA_8B | {"ici_fsdp_parallelism": 2, "ici_context_parallelism": 32},
    ),
    "8B pp 2, cp 32": Row(
        "v5p:4x4x4",
        64,
        2,
        131072,
        LLAMA_8B | ONE_FSDP | TWO_RANKS | {"ici_context_parallelism": 32},
    ),
    "70B fsdp 16, cp 16": Row(
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


GPU_ROWS = {
    "8B fsdp 2, cp 4": Row(
        "h100:8",
        8,
        2,
        32768,
        LLAMA_8B | {"ici_fsdp_parallelism": 2, "ici_context_parallelism": 4},
    ),
    "8B cp 8": Row(
        "h100:8",
        8,
        1,
        131072,
        LLAMA_8B | ONE_FSDP | {"ici_context_parallelism": 8},
    ),
    "70B fsdp 8, cp 8": Row(
        "h100:8x8",
        64,
        8,
        32768,
        LLAMA_8B
        | {
            "model_name": "llama3.1-70b",
            "ici_fsdp_parallelism": 8,
            "ici_context_parallelism": 8,
        },
    ),
}
FSDP_8 = LLAMA_8B | {"ici_fsdp_parallelism": 8, "ici_context_parallelism": 2}
FSDP_2 = LLAMA_8B | {"ici_fsdp_parallelism": 2, "ici_context_parallelism": 8}
LIBTPU, OURS = {"compile_default_flags": "none"}, {"compile_default_flags": "all"}
# name: (what is compiled, MaxText's GB of the peak and seconds busy and exposed)
BESIDE_MAXTEXT = {
    "fsdp 8, cp 2": (Row("v5p:2x2x4", 16, 16, 16384, FSDP_8 | LIBTPU), (20.75, 3.57, 0.16)),
    "fsdp 8, cp 2, 32k": (Row("v5p:2x2x4", 16, 8, 32768, FSDP_8 | LIBTPU), (21.01, 3.57, 0.19)),
    "fsdp 2, cp 8": (Row("v5p:2x2x4", 16, 16, 16384, FSDP_2 | LIBTPU), (21.18, 3.87, 0.30)),
    "fsdp 2, cp 8, 32k": (Row("v5p:2x2x4", 16, 8, 32768, FSDP_2 | LIBTPU), (21.14, 3.86, 0.38)),
    "fsdp 8, cp 2, flags": (Row("v5p:2x2x4", 16, 16, 16384, FSDP_8 | OURS), (20.75, 3.13, 0.10)),
}
SENT = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


def main() -> None:
    parser = argparse.ArgumentParser(description="long sequences, compiled ahead of time")
    parser.add_argument("rows", nargs="*", default=[*ROWS], help=f"of {', '.join(ROWS)}")
    parser.add_argument("--gpus", action="store_true", help="GPUs in place of TPUs")
    parser.add_argument("--beside-maxtext", action="store_true", help="what MaxText compiles too")
    parser.add_argument("--dump-hlo", type=Path, metavar="DIR", help="keep the programs in DIR")
    args = parser.parse_args()
    unknown = [name for name in args.rows if name not in ROWS]
    if unknown:
        parser.error(f"{unknown} are no rows. Rows are {', '.join(ROWS)}.")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.dump_hlo or Path(temporary)
        if args.gpus:
            lines = of_gpus(folder)
        elif args.beside_maxtext:
            lines = beside_maxtext(folder)
        else:
            lines = of_tpus(args.rows, folder)
        for text in lines:
            print(text, flush=True)


def of_tpus(names: list[str], folder: Path) -> Iterator[str]:
    yield "GB (1e9 bytes) and seconds of a step, per chip; (what `jaxpipe plan` says)"
    yield (
        f"{'row':<20}{'chips':>6} {'batch':<12}{'peak':>7}{'':>8}{'busy':>7}{'exposed':>9}"
        f"{'attention':>11}{'step':>8}"
    )
    for name in names:
        row = ROWS[name]
        report, time = compile_row(row.settings, folder / name.replace(" ", "-"), row.topology)
        attention = report["step_time"]["busy_seconds"]["kernels"]
        step = time.busy + time.exposed + attention
        predicted_bytes, predicted_seconds = plan(row)
        yield (
            f"{start_of_line(name, row, report)}{f'({predicted_bytes:.1f})':>8}{time.busy:>7.2f}"
            f"{time.exposed:>9.2f}{attention:>11.2f}{step:>8.2f} ({predicted_seconds:.2f})"
        )


def of_gpus(folder: Path) -> Iterator[str]:
    yield "GB (1e9 bytes) of a step, per GPU; (what `jaxpipe plan` says, with seconds of the step)"
    yield (
        f"{'row':<20}{'GPUs':>6} {'batch':<12}{'peak':>7}{'':>8}  "
        f"{'GB AG / RS / AR / A2A':<24}{'(step)':>8}"
    )
    for name, row in GPU_ROWS.items():
        report = compile_report(row.settings, folder / name.replace(" ", "-"), row.topology)
        predicted_bytes, predicted_seconds = plan(row)
        sent = " ".join(f"{gigabytes(report['totals'], kind):5.1f}" for kind in SENT)
        yield (
            f"{start_of_line(name, row, report)}{f'({predicted_bytes:.1f})':>8}  {sent:<24}"
            f"{f'({predicted_seconds:.2f})':>8}"
        )


def beside_maxtext(folder: Path) -> Iterator[str]:
    yield "GB (1e9 bytes) and seconds of a step, per chip, without kernels; (MaxText's)"
    yield (
        f"{'row':<20}{'chips':>6} {'batch':<12}{'peak':>7}{'':>8}{'busy':>7}{'':>8}{'exposed':>9}"
        f"{'':>8}{'step':>7}"
    )
    for name, (row, (peak, busy, exposed)) in BESIDE_MAXTEXT.items():
        report, time = compile_row(row.settings, folder / name.replace(" ", "-"), row.topology)
        yield (
            f"{start_of_line(name, row, report)}{f'({peak:.1f})':>8}{time.busy:>7.2f}"
            f"{f'({busy:.2f})':>8}{time.exposed:>9.2f}{f'({exposed:.2f})':>8}"
            f"{time.busy + time.exposed:>7.2f}{f'({busy + exposed:.2f})':>8}"
        )


def start_of_line(name: str, row: Row, report: dict) -> str:
    batch = f"{row.sequences} x {row.length}"
    peak = report["memory"]["peak_bytes"] / 1e9
    return f"{name:<20}{row.devices:>6} {batch:<12}{peak:>7.1f}"


def plan(row: Row) -> tuple[float, float]:
    """Returns GB of the peak and seconds of a step that `jaxpipe plan` says of one layout."""
    fixed = {"ici_pipeline_parallelism": 1, "ici_tensor_parallelism": 1, "ici_fsdp_parallelism": 1}
    fixed |= {"remat_policy": "full", "num_vocab_tiling": 1} | row.layout
    keys = [f"{key}={str(value).lower()}" for key, value in fixed.items()]
    command = [sys.executable, "-m", "jaxpipe", "plan", "--devices", row.topology, "--json", *keys]
    command += ["--batch", str(row.sequences), "--sequence", str(row.length), "--top", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    (best,) = json.loads(done.stdout)["plans"]
    return best["memory_bytes"]["total"] / 1e9, best["step_seconds"]


if __name__ == "__main__":
    main()
