"""What the training loop costs beyond its compiled step: data, metrics, logging and checkpoints.

    python benchmarks/loop.py [key=value ...]

Trains on the built-in text, 4 ranks of the circular engine on emulated devices unless told
otherwise, with metrics and TensorBoard events of every step and a checkpoint after every 50. After
every 25 steps the run pauses for as many calls of the bare compiled step, so that both see the same
machine, however its speed changes. A round is 50 steps of each: the run's part has a whole save in
it, which begins after a pause and is done long before the next. Takes about seven minutes on two
cores. Settings win over those of this file.
"""

import contextlib
import io
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

from jaxpipe.cli import emulate_devices
from jaxpipe.models import PRESETS
from jaxpipe.train import Config, load_config

TURN, TURNS, ROUNDS = 25, 2, 10
STEPS = TURN * TURNS * (ROUNDS + 1)  # the first round warms up
SETTINGS = [
    "dataset_type=text",
    "emulate_devices=4",
    "ici_pipeline_parallelism=4",
    "per_device_batch_size=4",
    f"checkpoint_period={TURN * TURNS}",
    "dtype=float32",
]


class Time(NamedTuple):
    """In seconds: on the wall, and of the CPU in all threads of the process."""

    wall: float
    cpu: float

    def __sub__(self, other: "Time") -> "Time":
        return Time(self.wall - other.wall, self.cpu - other.cpu)


def now() -> Time:
    return Time(time.perf_counter(), time.process_time())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"output_dir={folder}", f"steps={STEPS}"]
        config = load_config(overrides=[*SETTINGS, *sys.argv[1:], *fixed], presets=PRESETS)
        emulate_devices(config.emulate_devices)
        turns = _run(config)
    rounds = [turns[i : i + TURNS] for i in range(TURNS, len(turns), TURNS)]
    print(f"{'':<8}{'bare step, ms':>16}{'loop, ms':>12}{'loop / bare':>14}{'of CPU time':>14}")
    ratios = []
    for i, pairs in enumerate(rounds, start=1):
        bare, loop = (
            Time(*map(sum, zip(*batch_inputs, strict=True)))
            for batch_inputs in zip(*pairs, strict=True)
        )
        ratios.append((loop.wall / bare.wall, loop.cpu / bare.cpu))
        steps, times = (1e3 * part.wall / (TURN * TURNS) for part in (bare, loop)), ratios[-1]
        print("{:<8}{:>16.2f}{:>12.2f}{:>14.3f}{:>14.3f}".format(i, *steps, *times))
    wall, cpu = map(statistics.median, zip(*ratios, strict=True))
    print(f"{'median':<36}{wall:>14.3f}{cpu:>14.3f}")


def _run(config: Config) -> list[tuple[Time, Time]]:
    """Of every turn, what the bare steps and what the run have taken."""
    from jaxpipe.train import train

    bare = _bare_steps(config)
    turns: list[tuple[Time, Time]] = []
    started = now()

    class Stream(io.StringIO):
        """Pauses the run when it shows the last step of a turn."""

        def write(self, text: str) -> int:
            nonlocal started
            shown = re.match(r"step +(\d+)/", text)
            if shown and int(shown[1]) % TURN == 0:
                _wait()  # for the step that is on its way, if one is
                run_time = now() - started
                turns.append((bare(), run_time))
                started = now()
            return super().write(text)

    train(config, stream=Stream())
    assert len(turns) == TURNS * (ROUNDS + 1), "the run shows the last step of every turn"
    return turns


def _wait() -> None:
    """Waits for all arrays, but for those that a save in the background deletes meanwhile."""
    import jax

    for array in jax.live_arrays():
        with contextlib.suppress(RuntimeError):
            array.block_until_ready()


def _bare_steps(config: Config) -> Callable[[], Time]:
    """What makes a turn of the step alone, on one batch, and says what that took."""
    import jax

    from jaxpipe.train import set_up
    from jaxpipe.train.loop import make_data
    from jaxpipe.train.step import init_state, make_train_step, shard_batch

    setup = set_up(config, jax.devices())
    with jax.set_mesh(setup.mesh):
        step, state = make_train_step(setup.step), init_state(setup.step)
        batch_at = make_data(config, setup.batch).training
        batch = shard_batch(setup.batch, batch_at(0))

    def bare() -> Time:
        nonlocal state
        started = now()
        for _ in range(TURN):
            state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        return now() - started

    return bare


if __name__ == "__main__":
    main()
