"""Trains one model twice, pipelined and not, and shows that the losses are the same.

Runs two commands of `jaxpipe train` with examples/demo.yml: once over 4 ranks x 2 fsdp shards (8
emulated CPU devices), once as the plain program on one device. Writes into runs/demo.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxpipe.schedules import Costs, build, simulate, to_svg
from jaxpipe.train import read_metrics
from jaxpipe.train.logs import loss_curve

HERE = Path(__file__).parent
FOLDER = Path("runs/demo")
ROWS = 16  # of a batch, over all devices
RUNS = {
    "pipelined": [
        "pipeline_engine=circular",
        "emulate_devices=8",
        "ici_pipeline_parallelism=4",
        "ici_fsdp_parallelism=2",
        f"per_device_batch_size={ROWS / 8}",
    ],
    "unpipelined": [
        "pipeline_engine=none",
        "emulate_devices=1",
        f"per_device_batch_size={ROWS}",
    ],
}
LARGEST_DIFFERENCE = 1e-5  # relative, of any step's loss
SMALLEST_FALL = 0.25  # of the loss, from the first step to the last


def main() -> int:
    shutil.rmtree(FOLDER, ignore_errors=True)
    losses = {name: run(name, settings) for name, settings in RUNS.items()}
    steps = list(range(1, len(losses["pipelined"]) + 1))
    loss_curve(FOLDER / "loss.png", {name: (steps, values) for name, values in losses.items()})
    schedule = build("circular", ranks=4, microbatches=8, chunks=2)
    picture = to_svg(simulate(schedule, Costs()), "Circular: 4 ranks, 2 repeats, 8 microbatches")
    (FOLDER / "schedule.svg").write_text(picture, encoding="utf-8")
    return report(losses)


def run(name: str, settings: list[str]) -> list[float]:
    """Trains and returns the loss of every step."""
    command = [sys.executable, "-m", "jaxpipe", "train", str(HERE / "demo.yml")]
    subprocess.run([*command, f"run_name={name}", *settings], check=True)
    return [line["loss"] for line in read_metrics(FOLDER / name / "metrics.jsonl")]


def report(losses: dict[str, list[float]]) -> int:
    """Prints the losses side by side; 1 if they differ or did not fall."""
    table = Table("step", "pipelined", "unpipelined", "relative difference")
    pairs = list(zip(losses["pipelined"], losses["unpipelined"], strict=True))
    differences = [abs(a - b) / abs(b) for a, b in pairs]
    for step, ((a, b), difference) in enumerate(zip(pairs, differences, strict=True), start=1):
        table.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{difference:.1e}")
    console = Console()
    console.print(table)
    fall = 1 - losses["pipelined"][-1] / losses["pipelined"][0]
    console.print(f"largest relative difference {max(differences):.1e}  (<= {LARGEST_DIFFERENCE})")
    console.print(f"loss fell by {fall:.0%}  (>= {SMALLEST_FALL:.0%})")
    console.print(f"pictures: {FOLDER}/loss.png, {FOLDER}/schedule.svg")
    return int(max(differences) > LARGEST_DIFFERENCE or fall < SMALLEST_FALL)


if __name__ == "__main__":
    sys.exit(main())
