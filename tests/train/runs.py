"""Three steps of a tiny model under any settings, and the states between them."""

import functools
import operator
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe import models
from jaxpipe.data import synthetic_batches
from jaxpipe.mpmd import MpmdArray
from jaxpipe.train import Config, set_up
from jaxpipe.train.checkpoint import (
    canonical_round_trip,
    canonical_shapes,
    state_from_canonical,
    with_layers_after,
)
from jaxpipe.train.loop import RunData, make_data
from jaxpipe.train.plan import Setup
from jaxpipe.train.step import (
    TrainState,
    init_state,
    make_train_step,
    shard_batch,
    stored_shardings,
)

Settings = dict[str, Any]

TINY: Settings = {
    "base_emb_dim": 16,
    "base_num_decoder_layers": 4,
    "base_mlp_dim": 32,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "dtype": "float32",
    "max_target_length": 16,
    "num_pipeline_microbatches": 4,
    "learning_rate": 1e-2,
    "adam_weight_decay": 0.5,
    "enable_tensorboard": False,
    "steps": 3,
}
ROWS = 8
NONE: Settings = {"pipeline_engine": "none"}
DEEPSEEK: Settings = {
    **models.PRESETS["deepseek-tiny"],
    "model_name": "deepseek-tiny",
    "base_num_decoder_layers": 5,
    "head_dim": 16,
    "base_num_kv_heads": 2,
    "base_emb_dim": 16,
    "load_balance_loss_weight": 0.1,
}
MIXTURE: Settings = {
    **models.PRESETS["qwen3-moe-tiny"],
    "model_name": "qwen3-moe-tiny",
    "base_num_decoder_layers": 4,
    "base_emb_dim": 16,
    "load_balance_loss_weight": 0.1,
}
GEMMA: Settings = {
    **models.PRESETS["gemma3-tiny"],
    "model_name": "gemma3-tiny",
    "base_num_decoder_layers": 5,
    "base_emb_dim": 16,
    "sliding_window_size": 5,
    "sliding_window_pattern": 3,
    "pipeline_parallel_layers": 4,
}
"""Layers LLGL in the pipeline and an L behind it: L|LGL on two ranks, or LL|GL."""
GPT_OSS: Settings = {
    **models.PRESETS["gpt-oss-tiny"],
    "model_name": "gpt-oss-tiny",
    "base_num_decoder_layers": 4,
    "base_emb_dim": 16,
    "sliding_window_size": 5,
    "load_balance_loss_weight": 0.1,
}
LLAMA4: Settings = {
    **models.PRESETS["llama4-tiny"],
    "model_name": "llama4-tiny",
    "base_num_decoder_layers": 8,
    "base_emb_dim": 16,
    "chunk_attn_window_size": 5,
    "load_balance_loss_weight": 0.1,
}
"""Four layers of the pipeline, each a block of two."""
DROPOUT: Settings = {"dropout_rate": 0.3}


class Run(NamedTuple):
    """Three steps of a run.

    Attributes:
        setup: What they ran on.
        go_on: From a canonical state to the loss of the run's next step.
        metrics: Of the three steps.
        first: The canonical state before them.
        saved: The canonical state after two.
        last: The state after three.
    """

    setup: Setup
    go_on: Callable[[TrainState], float]
    metrics: list[dict[str, float]]
    first: TrainState
    saved: TrainState
    last: TrainState


def config_of(num_devices: int, *settings: Settings) -> Config:
    base = TINY | {"per_device_batch_size": ROWS / num_devices, "ici_fsdp_parallelism": 1}
    return Config.model_validate(functools.reduce(operator.or_, settings, base))


def setup_of(num_devices: int, *settings: Settings) -> Setup:
    return set_up(config_of(num_devices, *settings), jax.devices()[:num_devices])


def setup_with_file(num_devices: int, settings: Settings) -> Setup:
    """A schedule of several lines is read from a file."""
    text = settings.get("pipeline_schedule", "")
    if "\n" not in text:
        return setup_of(num_devices, settings)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "schedule.csv"
        file.write_text(text)
        return setup_of(num_devices, settings, {"pipeline_schedule": str(file)})


def data_of(setup: Setup) -> RunData:
    return make_data(setup.config, setup.batch)


def flat(setup: Setup, state: TrainState) -> TrainState:
    """The canonical numbers of a state, which stays as it is."""
    take, _ = canonical_round_trip(setup.state, stored_shardings(setup.step))
    return jax.device_get(take(jax.tree.map(_copied, state)))


def _copied(x: jax.Array | MpmdArray) -> jax.Array | MpmdArray:
    if not isinstance(x, MpmdArray):
        return jnp.copy(x)
    arrays = {rank: jnp.asarray(x.on_rank(rank), copy=True) for rank in x.mpmd_idxs}
    return MpmdArray.of_ranks(arrays, x.mpmd_sharding, x.shape, x.dtype)


def three_steps(num_devices: int, settings: Settings) -> Run:
    """Runs them, and keeps what tests ask about."""
    setup = setup_with_file(num_devices, settings)
    batch_at = synthetic_batches(vocab_size=64, batch_size=ROWS, length=16, seed=0)
    train_step = make_train_step(setup.step)

    def one(state: TrainState) -> tuple[TrainState, dict[str, float]]:
        with jax.set_mesh(setup.mesh):
            batch = shard_batch(setup.batch, batch_at(int(state["step"])))
            state, metrics = train_step(state, batch)
        return state, {name: float(value) for name, value in metrics.items()}

    def go_on(saved: TrainState) -> float:
        # As a checkpoint would be restored: with the layers after the pipeline that it has.
        after = jax.tree.leaves(saved["weights"]["head"].get("layers", ()))
        as_saved = with_layers_after(setup.state, len(after[0]) if after else 0)
        where = jax.tree.map(lambda leaf: leaf.sharding, canonical_shapes(as_saved))
        return one(
            state_from_canonical(
                setup.state, stored_shardings(setup.step), jax.device_put(saved, where)
            )
        )[1]["loss"]

    state, metrics = init_state(setup.step), []
    canonicals = [flat(setup, state)]
    for _ in range(3):
        state, of_step = one(state)
        metrics.append(of_step)
        canonicals.append(flat(setup, state))
    return Run(setup, go_on, metrics, canonicals[0], canonicals[2], state)
