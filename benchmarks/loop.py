"""What the training loop costs beyond its compiled step: data, metrics, logging and checkpoints.

    python benchmarks/loop.py [key=value ...]

Trains on the built-in text, 4 ranks of the circular engine on emulated devices unless told
otherwise, with metrics and TensorBoard events of every step and a checkpoint after every 50. Each
round times that, to the end of the last save, and as many calls of the bare compiled step on one
batch, in the same process. Settings win over those of this file.
"""

import io
import statistics
import sys
import tempfile
import time

from jaxpipe.cli import emulate_devices
from jaxpipe.models import PRESETS
from jaxpipe.train import Config, load_config

STEPS, ROUNDS = 200, 3
SETTINGS = [
    "dataset_type=text",
    "emulate_devices=4",
    "ici_pipeline_parallelism=4",
    "per_device_batch_size=4",
    "checkpoint_period=50",
    "dtype=float32",
]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"output_dir={folder}", f"jax_cache_dir={folder}/cache", f"steps={STEPS + 1}"]
        config = load_config(overrides=[*SETTINGS, *sys.argv[1:], *fixed], presets=PRESETS)
        emulate_devices(config.emulate_devices)
        _loop(config, "first")  # fills the cache of compiled programs
        pairs = [(_bare(config), _loop(config, str(i))) for i in range(ROUNDS)]
    print(f"{'round':<8}{'bare step, ms':>16}{'loop, ms':>12}{'loop / bare':>14}")
    for i, (bare, loop) in enumerate(pairs, start=1):
        print(f"{i:<8}{1e3 * bare / STEPS:>16.2f}{1e3 * loop / STEPS:>12.2f}{loop / bare:>14.3f}")
    print(f"median of the ratios: {statistics.median(loop / bare for bare, loop in pairs):.3f}")


def _bare(config: Config) -> float:
    """Seconds of `STEPS` calls of the step, after a first one."""
    import jax

    from jaxpipe.train import initial_state, make_batches, make_train_step, place_batch, set_up

    setup = set_up(config, jax.devices())
    with jax.set_mesh(setup.mesh):
        step, state = make_train_step(setup), initial_state(setup)
        batch = place_batch(setup, make_batches(setup)(0))
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        start = time.perf_counter()
        for _ in range(STEPS):
            state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        return time.perf_counter() - start


class _Stream(io.StringIO):
    """Takes the time when the first step is shown."""

    first: float | None = None

    def write(self, text: str) -> int:
        if self.first is None and text.startswith("step 1/"):
            self.first = time.perf_counter()
        return super().write(text)


def _loop(config: Config, name: str) -> float:
    """Seconds of a run, from the end of its first step to when all is saved."""
    from jaxpipe.train import train

    stream = _Stream()
    train(config.model_copy(update={"run_name": name}), stream=stream)
    assert stream.first is not None, "the run shows its first step"
    return time.perf_counter() - stream.first


if __name__ == "__main__":
    main()
