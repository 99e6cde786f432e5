"""Memory, time and communication of train steps on H100s that are not there, as XLA:GPU has them.

    pip install "jaxpipe[train,aot-gpu]"
    JAX_PLATFORMS=cpu python benchmarks/gpu_memory.py [--dump-hlo DIR] [row ...]

Compiles the real train step of every row, one after the other: some minutes each on two cores.
`busy` is a roofline of what XLA scheduled, `exposed` what a GPU waits for collectives while the
program is played, `hidden` the share of their time in which it does not wait, and `step` the sum
with bubbles. A step that ran on an H200 took 1.1 to 1.3 times its roofline (benchmarks/gpu.py).
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tpu_memory import compile_report

FSDP = {"pipeline_engine": "none", "num_pipeline_microbatches": 1, "remat_policy": "full"}
ONE_F_ONE_B = {
    "pipeline_engine": "scheduled",
    "pipeline_schedule": "1f1b",
    "pipeline_fsdp_ag_per_layer": True,
    "set_remat_policy_on_layers_per_stage": True,
    "set_remat_policy_on_pipeline_iterations": False,
}
CIRCULAR = {"pipeline_engine": "circular", "set_remat_policy_on_layers_per_stage": True}


class Row(NamedTuple):
    """A model on devices, with the keys of its layout."""

    model: str
    devices: str
    sequences: float  # of 4,096 tokens, of each GPU
    layout: dict[str, Any]


def stages(ranks: int, fsdp: int, microbatches: int) -> dict[str, int]:
    """Returns the keys of a pipeline whose ranks are divided over `fsdp`."""
    return {
        "ici_pipeline_parallelism": ranks,
        "ici_fsdp_parallelism": fsdp,
        "num_pipeline_microbatches": microbatches,
    }


SEVEN, SEVENTY, EXPERTS = "llama2-7b", "llama3.1-70b", "deepseek2-16b"
ROWS = {
    "7B FSDP 8": Row(SEVEN, "h100:8", 4, FSDP),
    "7B 1F1B 2 x 4": Row(SEVEN, "h100:8", 4, ONE_F_ONE_B | stages(2, 4, 8)),
    "7B circular 2 x 4": Row(SEVEN, "h100:8", 4, CIRCULAR | stages(2, 4, 8)),
    "7B FSDP 32": Row(SEVEN, "h100:4x8", 4, FSDP),
    "7B 1F1B 4 x 8": Row(SEVEN, "h100:4x8", 4, ONE_F_ONE_B | stages(4, 8, 16)),
    "70B FSDP 32": Row(SEVENTY, "h100:4x8", 2, FSDP),
    "70B 1F1B 4 x 8": Row(SEVENTY, "h100:4x8", 2, ONE_F_ONE_B | stages(4, 8, 8)),
    "16B FSDP 8": Row(EXPERTS, "h100:8", 4, FSDP),
    "16B 1F1B 2 x 4": Row(EXPERTS, "h100:8", 4, ONE_F_ONE_B | stages(2, 4, 8)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="train steps, compiled for H100s")
    parser.add_argument("rows", nargs="*", metavar="row", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--dump-hlo", type=Path, metavar="DIR")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for line in table(args.rows or list(ROWS), args.dump_hlo or Path(folder)):
            print(line, flush=True)


def table(names: list[str], folder: Path) -> Iterator[str]:
    """Yields the lines of the table."""
    yield (
        f"{'row':<20}{'GPUs':>5}{'peak GB':>9}{'busy s':>8}{'bubbles':>9}{'exposed':>9}"
        f"{'step s':>8}{'hidden AG':>11}{'RS':>6}{'AR':>6}{'CP':>6}{'all':>6}"
    )
    for name in names:
        row = ROWS[name]
        keys = {
            "model_name": row.model,
            "max_target_length": 4096,
            "per_device_batch_size": row.sequences,
            "num_vocab_tiling": 4,
        }
        report = compile_report(keys | row.layout, folder / name.replace(" ", "-"), row.devices)
        time = report["step_time"]
        exposed, moved = time["exposed_seconds"], time["transfer_seconds"]
        kinds = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute")
        shares = [_hidden(exposed.get(kind, 0.0), moved.get(kind, 0.0)) for kind in kinds]
        shares.append(_hidden(sum(exposed.values()), sum(moved.values())))
        yield (
            f"{name:<20}{report['num_devices']:>5}{report['memory']['peak_bytes'] / 1e9:>9.1f}"
            f"{sum(time['busy_seconds'].values()):>8.2f}{time['bubble_seconds']:>9.2f}"
            f"{sum(exposed.values()):>9.2f}{time['seconds']:>8.2f}"
            f"{shares[0]:>11}" + "".join(f"{share:>6}" for share in shares[1:])
        )


def _hidden(exposed: float, moved: float) -> str:
    return f"{1 - exposed / moved:.0%}" if moved > 1e-4 else "-"


if __name__ == "__main__":
    main()
