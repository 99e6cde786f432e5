"""Numbers and lowered programs of one row for every way to run, and their comparison.

    PYTHONPATH=tests python tests/goldens/record.py [--only TEXT] FOLDER
    PYTHONPATH=tests python tests/goldens/record.py [--only TEXT] --compare FOLDER

The first writes `FOLDER/record.json`, the text of every program, and a checkpoint. The second
records again and prints what differs: programs by their text without locations, losses, states and
gradients bit by bit, and the losses of a run that goes on from the checkpoint. Run it before a
change that moves code, and after it, with one version of JAX.
"""

import argparse
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from linen import test_pipeline as linen_pipeline
from train import runs, test_mpmd, test_scheduled

from harness import front_door, frontends
from jaxpipe.data import synthetic_batches
from jaxpipe.train import train
from jaxpipe.train.step import init_state, make_train_step, shard_batch

FSDP, DATA, EXPERT = (("fsdp", 2),), (("data", 2),), (("expert", 2),)
FRONT_DOOR = [
    front_door.Row("gpt", None, 1),
    front_door.Row("gpt", "circular", 2, FSDP, chunks=2),
    front_door.Row("gpt", "1f1b", 2, FSDP),
    front_door.Row("gpt", "1f1b", 2, engine="mpmd"),
    front_door.Row("gpt", "zbv", 2),
    front_door.Row("gpt", "zero_bubble_h1", 2, FSDP, layers=(3, 5), tx="muon"),
    front_door.Row("weighted", "interleaved_1f1b", 2, DATA, tx="adafactor"),
    front_door.Row("weighted", "circular", 2, FSDP, layers=(3, 5)),
    front_door.Row("experts", "circular", 2, EXPERT),
    front_door.Row("experts", "1f1b", 2, EXPERT, engine="mpmd"),
    front_door.Row("contrastive", "1f1b", 2, DATA),
]
CIRCULAR: runs.Settings = {"ici_pipeline_parallelism": 2}
FSDP_2: runs.Settings = {"ici_fsdp_parallelism": 2}
ACCUMULATED: runs.Settings = {"gradient_accumulation_steps": 2, "per_device_batch_size": 2.0}
LOOPS: dict[str, tuple[int, runs.Settings]] = {
    "once": (4, CIRCULAR | FSDP_2 | {"pipeline_fsdp_ag_once": True}),
    "per repeat": (4, CIRCULAR | FSDP_2 | {"pipeline_fsdp_ag_per_repeat": True}),
    "per tick": (4, CIRCULAR | FSDP_2),
    "delay": (2, CIRCULAR | {"pipeline_delay_activation_forwarding": True}),
    "no scan": (2, CIRCULAR | {"scan_pipeline_iterations": False}),
    "no scan of repeats": (2, CIRCULAR | {"scan_pipeline_repeats": False}),
    "vocabulary parallel": (2, CIRCULAR | {"pipeline_vocab_parallel": True}),
    "no pipeline": (2, FSDP_2),
    "no pipeline, accumulated": (2, FSDP_2 | ACCUMULATED),
    "accumulated": (2, CIRCULAR | ACCUMULATED),
}
CHECKPOINT = {
    "ici_fsdp_parallelism": 4,
    "per_device_batch_size": 2.0,
    "checkpoint_period": 2,
    "steps": 2,
    "learning_rate_schedule_steps": 4,
}


def trainer_rows() -> dict[str, tuple[int, runs.Settings]]:
    """Devices and settings of the trainer's rows."""
    rows = {f"loops: {name}": row for name, row in LOOPS.items()}
    rows |= {f"scheduled: {n}": r for n, r in (test_scheduled.RUNS | test_scheduled.SLOW).items()}
    rows |= {f"mpmd: {name}": row for name, row in (test_mpmd.RUNS | test_mpmd.SLOW).items()}
    return rows


def digest(tree: Any) -> str:
    """Returns a hash of the bytes of all leaves, with their paths."""
    hashed = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        hashed.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        hashed.update(array.tobytes())
    return hashed.hexdigest()[:16]


def of_trainer(num_devices: int, settings: runs.Settings) -> dict[str, Any]:
    """Runs three steps, and lowers the step if it is one program."""
    run = runs.three_steps(num_devices, settings)
    plan, text = run.setup.step, None
    if not plan.engine.storage.per_stage:
        step: Any = make_train_step(plan)
        batch_at = synthetic_batches(vocab_size=64, batch_size=runs.ROWS, length=16, seed=0)
        with jax.set_mesh(plan.pipeline.mesh):
            batch = shard_batch(run.setup.batch, batch_at(0))
            text = step.lower(init_state(plan), batch).as_text()
    losses = [metrics["loss"].hex() for metrics in run.metrics]
    return {"losses": losses, "state": digest(runs.flat(run.setup, run.last)), "text": text}


def of_front_door(row: front_door.Row) -> dict[str, Any]:
    """Runs two steps of a pipeline, and lowers the step if it is one program."""
    case, layers = front_door.CASES[row.model], row.layers
    params = case.init(sum(layers) if isinstance(layers, tuple) else layers)
    pipe = front_door.pipeline_of(row, case)
    tx, stored = pipe.optimizer(front_door.OPTIMIZERS[row.tx]()), pipe.shard(params)
    state = tx.init(stored)

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = pipe.value_and_grad(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, grads

    compiled, text, losses = pipe.jit(step), None, []
    if row.engine != "mpmd":
        with jax.set_mesh(pipe.mesh):
            text = jax.jit(step).lower(stored, state, front_door.batch(row.rows, 0)).as_text()
    grads: Any = None
    for i in range(2):
        stored, state, (loss, _), grads = compiled(stored, state, front_door.batch(row.rows, i))
        losses.append(float(loss).hex())
    numbers = jax.device_get(pipe.unshard(stored)), jax.device_get(pipe.unshard(grads))
    return {"losses": losses, "state": digest(numbers), "text": text}


def of_linen(row: frontends.Row) -> dict[str, Any]:
    """Differentiates a pipeline that is a Linen module."""
    pipeline, variables = linen_pipeline.built(row)
    inputs, *batch_inputs = row.batch()
    rngs = {"dropout": jax.random.key(11)}

    def loss(variables: Any, inputs: Any) -> Any:
        return frontends.scalar(pipeline.apply(variables, inputs, *batch_inputs, rngs=rngs))

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    value, grads = step(variables, inputs)
    text = step.lower(variables, inputs).as_text()
    return {"losses": [float(value).hex()], "state": digest(grads), "text": text}


def losses_of_training(folder: Path, **settings: Any) -> list[str]:
    """Trains in a folder, from its checkpoint if it has one; returns the losses."""
    place = {"output_dir": str(folder)}
    config = runs.config_of(8, CIRCULAR, CHECKPOINT, place, settings)
    return [metrics["loss"].hex() for metrics in train(config, stream=io.StringIO())]


def rows() -> Iterator[tuple[str, Any]]:
    """Yields a name and the function that records it."""
    for row in FRONT_DOOR:
        yield f"front door: {row}", lambda row=row: of_front_door(row)
    for row in frontends.EXACT:
        yield f"linen: {row}", lambda row=row: of_linen(row)
    for name, (devices, settings) in trainer_rows().items():
        yield f"train, {name}", lambda n=devices, s=settings: of_trainer(n, s)


def record(only: str, folder: Path) -> dict[str, Any]:
    """Records all rows, writes what was lowered, and returns what to compare."""
    found: dict[str, Any] = {"jax": jax.__version__}
    (folder / "text").mkdir(parents=True, exist_ok=True)
    for name, run in rows():
        if only not in name:
            continue
        try:
            with jax.numpy_dtype_promotion("standard"):
                row = run()
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {str(error)[:200]}", "text": None}
        text = row.pop("text")
        if text is not None:
            row["text"] = hashlib.sha256(text.encode()).hexdigest()[:16]
            (folder / "text" / f"{row['text']}.mlir").write_text(text)
        found[name] = row
        print(name, row.get("losses", row.get("error")), flush=True)
        jax.clear_caches()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="numbers and programs before and after a change")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="rows whose names have this text")
    parser.add_argument("--compare", action="store_true", help="with the record in the folder")
    args = parser.parse_args()
    file, saved = args.folder / "record.json", args.folder / "checkpoint"
    if not args.compare:
        found = record(args.only, args.folder)
        found["first steps"] = losses_of_training(saved)
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(saved, copy, dirs_exist_ok=True)
            found["resumed"] = losses_of_training(Path(copy), steps=4)
        file.write_text(json.dumps(found, indent=1))
        return 0
    before = json.loads(file.read_text())
    now = record(args.only, args.folder / "now")
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(saved, copy, dirs_exist_ok=True)
        now["resumed"] = losses_of_training(Path(copy), steps=4)
    differing = [name for name in now if now[name] != before.get(name)]
    for name in differing:
        print(f"DIFFERS {name}\n  was {before.get(name)}\n  is  {now[name]}")
    print(f"{len(now) - len(differing)} of {len(now)} are equal")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
