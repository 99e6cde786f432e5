"""The train step: from a state and a batch to the next state and metrics.

R repeats, S ranks, L layers, M microbatches of b rows in each of A steps of gradient accumulation,
T tokens per row.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Int64, PyTree

from ... import sharding
from ...autodiff import StagedModel
from ...autodiff.staged_model import slice_sequences
from ...data.batches._batches import Batch, RowsByStep
from ..optim._router_bias import drop_router_biases
from ..plan._from_config import import_flax_decoder
from ..plan._model import build_model
from ..plan._pipeline_plan import pipeline_plan
from ..plan._setup import Setup, batch_shapes, batch_shardings, compiler_options
from ._gradient_accumulation import gradient_accumulation
from ._init import dropout_keys_of_layers, init_boundary, init_layers
from ._mpmd import init_mpmd_state, make_mpmd_train_step
from ._optimizer_step import make_optimizer_step
from ._state import TrainState, gradient_shardings, make_optimizer, state_shardings


def init_state(setup: Setup) -> TrainState:
    """Initializes weights, optimizer state and step 0, each on the devices that hold it.

    Args:
        setup: The run.

    Returns:
        The train state.
    """
    if setup.per_stage_state:
        return init_mpmd_state(setup)
    optimizer = make_optimizer(setup)

    def make() -> TrainState:
        weights = _init_weights(setup)
        moments = optimizer.init(drop_router_biases(weights))
        return {"weights": weights, "optimizer": moments, "step": jnp.int32(0)}

    return jax.jit(make, out_shardings=state_shardings(setup))()


def _init_weights(setup: Setup) -> PyTree:
    """Initializes weights; every layer starts equal in every layout, also after the pipeline."""
    layout = setup.layout
    stages = init_layers(setup, layout.dims, layer_ids=layout.layer_ids)
    return init_boundary(setup) | {"stages": stages}


def make_train_step(
    setup: Setup,
) -> Callable[[TrainState, PyTree], tuple[TrainState, dict[str, Array]]]:
    """Builds the train step; it compiles at its first call.

    Args:
        setup: The run.

    Returns:
        `(state, batch from shard_batch) -> (state, metrics)`. The state that goes in is donated.
    """
    if setup.per_stage_state:
        return make_mpmd_train_step(setup)
    shardings, grad_shardings = state_shardings(setup), gradient_shardings(setup)
    weight_shardings, update_shardings = map(
        drop_router_biases, (shardings["weights"], grad_shardings)
    )
    value_and_grad = gradient_accumulation(
        make_value_and_grad(setup),
        setup.gradient_accumulation_steps,
        reshard=lambda found: (found[0], sharding.reshard(found[1], grad_shardings)),
    )
    step = make_optimizer_step(
        setup,
        value_and_grad,
        partial(dropout_keys, setup),
        # With ZeRO-1 every device updates its part of the weights, and gathers the others'.
        shard=lambda tree: sharding.reshard(tree, update_shardings),
        unshard=lambda tree: sharding.reshard(tree, weight_shardings),
    )
    return jax.jit(
        step,
        in_shardings=(shardings, batch_shardings(setup)),
        out_shardings=(shardings, None),
        donate_argnums=0,
        compiler_options=compiler_options(setup),
    )


def shard_batch(setup: Setup, batch: Batch) -> dict[str, ArrayLike]:
    """Shards a batch over the devices, in microbatches.

    `target_weights` are divided by their sum over the batch: each is then the share of its token in
    the loss, so that uneven masks need no care anywhere else. With `per_stage_state` arrays stay in
    host memory: the step transfers each to the ranks that read it.

    Args:
        setup: The run.
        batch: [B, T] arrays in host memory.

    Returns:
        [A * M, b, T] arrays on the devices.
    """
    return _shard_rows(setup, batch, np.arange(setup.batch_size), total_target_weight(batch))


def shard_batch_of_step(setup: Setup, batches: RowsByStep, step: int) -> dict[str, ArrayLike]:
    """Shards the batch of a step; makes only the rows that this process needs.

    Args:
        setup: The run.
        batches: Makes rows of the batch of any step.
        step: Number of the step.

    Returns:
        [A * M, b, T] arrays on the devices, as `shard_batch` returns them.
    """
    shape = batch_shapes(setup)["tokens"].shape
    where = batch_shardings(setup)["tokens"]
    row_ids = row_ids_of_shards(where.addressable_devices_indices_map(shape).values(), shape)
    # Ranks that run programs of their own each read all rows, a share on each of their devices.
    if setup.per_stage_state or len(row_ids) == setup.batch_size:
        return shard_batch(setup, batches.rows(step, range(setup.batch_size)))
    # All processes must divide by the same number, whatever rows they hold.
    return _shard_rows(
        setup, batches.rows(step, row_ids.tolist()), row_ids, float(batches.num_targets(step))
    )


def row_ids_of_shards(
    shard_indices: Iterable[tuple[slice, ...] | None], batch_shape: tuple[int, ...]
) -> Int64[np.ndarray, " n"]:
    """Returns the ids of rows of [A * M, b, T] arrays that shards hold, in ascending order."""
    needed = np.zeros(batch_shape[:2], bool)
    for index in shard_indices:
        assert index is not None, "devices of this process have a part"
        needed[index[:2]] = True
    return np.flatnonzero(needed)


def _shard_rows(
    setup: Setup, batch: Batch, row_ids: Int64[np.ndarray, " n"], total: float
) -> dict[str, ArrayLike]:
    """Shards the rows of a batch with these ids; `total` is the weight of the whole batch."""
    weights = (batch["target_weights"] / (total or 1.0)).astype(np.float32)
    batch = batch | {"target_weights": weights}
    shape = batch_shapes(setup)["tokens"].shape[:2]
    if setup.per_stage_state:
        return {name: rows.reshape(*shape, -1) for name, rows in batch.items()}
    found = np.full(setup.batch_size, -1)  # no device of this process asks for the others
    found[row_ids] = np.arange(len(row_ids))
    found = found.reshape(shape)

    def to_global_array(rows: np.ndarray, where: NamedSharding) -> Any:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "arrays are not scalars"
            return rows[found[index[:2]], index[2]]

        return jax.make_array_from_callback((*shape, rows.shape[1]), where, part)

    return jax.tree.map(to_global_array, batch, batch_shardings(setup))


def total_target_weight(batch: dict[str, np.ndarray]) -> float:
    """Sums the target weights of a batch in host memory."""
    return float(batch["target_weights"].sum(dtype=np.float64))


def _linen_value_and_grad(setup: Setup, model: StagedModel) -> Callable:
    flax_decoder = import_flax_decoder()
    return flax_decoder.linen_value_and_grad(flax_decoder.make_flax_decoder(setup, model))


def _nnx_value_and_grad(setup: Setup, model: StagedModel) -> Callable:
    flax_decoder = import_flax_decoder()
    return flax_decoder.nnx_value_and_grad(flax_decoder.make_flax_decoder(setup, model))


def make_value_and_grad(setup: Setup) -> Callable:
    """Returns the engine of a run, or the Flax front end whose modules run in it.

    Args:
        setup: The run.

    Returns:
        `(weights, batch_inputs, keys) -> ((loss, metrics), gradients)`.
    """
    model = build_model(setup)
    front_ends = {False: _linen_value_and_grad, True: _nnx_value_and_grad}
    if setup.config.enable_nnx is not None:
        return front_ends[setup.config.enable_nnx](setup, model)
    return of_slices(
        setup, partial(setup.config.engine.value_and_grad, pipeline_plan(setup), model)
    )


def of_slices(setup: Setup, run: Callable) -> Callable:
    """Returns an engine's function of whole sequences, which cuts them into the schedule's slices.

    Args:
        setup: The run.
        run: `(weights, batch_inputs [M * s, b, T / s], keys) -> ...`.

    Returns:
        `(weights, batch_inputs [M, b, T], keys) -> ...`.
    """

    def run_slices(weights: PyTree, batch_inputs: PyTree, keys: PyTree) -> Any:
        return run(weights, slice_sequences(batch_inputs, setup.num_slices, 2), keys)

    return run_slices


def dropout_keys(setup: Setup, step: Int[Array, ""]) -> PyTree:
    """Folds the [R, S, layers per stage] dropout keys of a step; () without dropout."""
    layout = setup.layout
    keys = dropout_keys_of_layers(setup, step, layout.layer_ids)
    return with_layer_mask(setup, jax.tree.map(lambda x: x.reshape(layout.dims), keys))


def with_layer_mask(setup: Setup, keys: PyTree) -> PyTree:
    """Adds the layer mask to the `keys` of stages, if not all stages have as many layers."""
    layout = setup.layout
    if not layout.counts:
        return keys
    layer_mask = jnp.asarray(layout.layer_ids) >= 0
    return {"dropout": keys, "layer_mask": layer_mask.reshape(layout.dims)}
