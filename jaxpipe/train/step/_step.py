"""The train step: a state goes in, the next one and its metrics come out.

R repeats, S ranks, L layers, M microbatches of b rows in each of A calls, T tokens a row.
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

from ... import sharding, spmd
from ...autodiff import Model, unpipelined
from ...data import Batch, RowsByStep
from ..optim._router_bias import without_router_biases
from ..plan._from_config import flax_decoder
from ..plan._fsdp import gathers
from ..plan._model import build_model
from ..plan._rematerialization import remat_of_ticks
from ..plan._setup import Setup, batch_shapes, batch_shardings, options_of_steps
from ._gradient_accumulation import in_calls
from ._init import first_ends, first_layers, layer_keys
from ._mpmd import initial_mpmd_state, make_mpmd_step
from ._optimizer_step import make_step
from ._state import State, gradient_shardings, make_optimizer, state_shardings


def initial_state(setup: Setup) -> State:
    """Weights, optimizer state and step 0, each made on the devices that hold it."""
    if setup.stages_apart:
        return initial_mpmd_state(setup)
    optimizer = make_optimizer(setup)

    def make() -> State:
        weights = _first_weights(setup)
        moments = optimizer.init(without_router_biases(weights))
        return {"weights": weights, "optimizer": moments, "step": jnp.int32(0)}

    return jax.jit(make, out_shardings=state_shardings(setup))()


def _first_weights(setup: Setup) -> PyTree:
    """Every layer starts equal in every layout, also after the pipeline."""
    layout = setup.layout
    stages = first_layers(setup, layout.dims, numbers=layout.numbers)
    return first_ends(setup) | {"stages": stages}


def make_train_step(setup: Setup) -> Callable[[State, PyTree], tuple[State, dict[str, Array]]]:
    """The step, `(state, batch from place_batch) -> (state, metrics)`.

    It compiles at its first call. The state that goes in is donated.
    """
    if setup.stages_apart:
        return make_mpmd_step(setup)
    shardings, of_gradients = state_shardings(setup), gradient_shardings(setup)
    stored, lie = map(without_router_biases, (shardings["weights"], of_gradients))
    value_and_grad = in_calls(
        ENGINES[engine_name(setup)](setup, build_model(setup)),
        setup.num_calls,
        place=lambda found: (found[0], sharding.place(found[1], of_gradients)),
    )
    step = make_step(
        setup,
        value_and_grad,
        partial(_dropout_keys, setup),
        # With ZeRO-1 every device updates its part of the weights, and gathers the others'.
        divide=lambda tree: sharding.place(tree, lie),
        undivide=lambda tree: sharding.place(tree, stored),
    )
    return jax.jit(
        step,
        in_shardings=(shardings, batch_shardings(setup)),
        out_shardings=(shardings, None),
        donate_argnums=0,
        compiler_options=options_of_steps(setup),
    )


def place_batch(setup: Setup, batch: Batch) -> dict[str, ArrayLike]:
    """[B, T] rows in host memory -> [A * M, b, T] on the devices.

    With stages apart they stay in host memory: the step puts each where it is read.

    `target_weights` come out divided by their sum over the batch: the share of each token in the
    loss, so that uneven masks need no care anywhere else.
    """
    return _place(setup, batch, np.arange(setup.batch_size), total_weight(batch))


def place_step(setup: Setup, batches: RowsByStep, step: int) -> dict[str, ArrayLike]:
    """As `place_batch`, of one batch by its number; makes only the rows that this process needs."""
    shape = batch_shapes(setup)["tokens"].shape
    where = batch_shardings(setup)["tokens"]
    numbers = rows_at(where.addressable_devices_indices_map(shape).values(), shape)
    # Ranks that run programs of their own each read all rows, a share on each of their devices.
    if setup.stages_apart or len(numbers) == setup.batch_size:
        return place_batch(setup, batches.rows(step, range(setup.batch_size)))
    # All processes must divide by the same number, whatever rows they hold.
    return _place(
        setup, batches.rows(step, numbers.tolist()), numbers, float(batches.num_targets(step))
    )


def rows_at(
    indices: Iterable[tuple[slice, ...] | None], shape: tuple[int, ...]
) -> Int64[np.ndarray, " n"]:
    """The numbers of the rows, in order, that some indices into arrays [A * M, b, T] reach."""
    needed = np.zeros(shape[:2], bool)
    for index in indices:
        assert index is not None, "devices of this process have a part"
        needed[index[:2]] = True
    return np.flatnonzero(needed)


def _place(
    setup: Setup, batch: Batch, numbers: Int64[np.ndarray, " n"], total: float
) -> dict[str, ArrayLike]:
    """Some rows of a batch, by their numbers, whose `target_weights` add up to `total` over all."""
    weights = (batch["target_weights"] / (total or 1.0)).astype(np.float32)
    batch = batch | {"target_weights": weights}
    shape = batch_shapes(setup)["tokens"].shape[:2]
    if setup.stages_apart:
        return {name: rows.reshape(*shape, -1) for name, rows in batch.items()}
    found = np.full(setup.batch_size, -1)  # no device of this process asks for the others
    found[numbers] = np.arange(len(numbers))
    found = found.reshape(shape)

    def place(rows: np.ndarray, where: NamedSharding) -> Any:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "arrays are not scalars"
            return rows[found[index[:2]], index[2]]

        return jax.make_array_from_callback((*shape, rows.shape[1]), where, part)

    return jax.tree.map(place, batch, batch_shardings(setup))


def total_weight(batch: dict[str, np.ndarray]) -> float:
    """The sum of the target weights of a batch, as the host has it."""
    return float(batch["target_weights"].sum(dtype=np.float64))


def _circular(setup: Setup, model: Model) -> Callable:
    config = setup.config
    gather, ends_gather = gathers(setup)

    def value_and_grad(weights, side, keys):
        return spmd.circular_value_and_grad(
            model,
            weights,
            side,
            keys,
            mesh=setup.mesh,
            delay=setup.config.pipeline_delay_activation_forwarding,
            remat=remat_of_ticks(config),
            gather=gather,
            ends_gather=ends_gather,
            scan_repeats=config.scan_pipeline_repeats,
        )

    return value_and_grad


def _scheduled(setup: Setup, model: Model) -> Callable:
    gather, ends_gather = gathers(setup)
    assert setup.schedule is not None and setup.schedule.ticks is not None
    ticks = setup.schedule.ticks

    def value_and_grad(weights, side, keys):
        return spmd.scheduled_value_and_grad(
            model,
            weights,
            side,
            keys,
            ticks=ticks,
            mesh=setup.mesh,
            remat=remat_of_ticks(setup.config),
            gather=gather,
            ends_gather=ends_gather,
            share_head=setup.config.pipeline_share_head,
        )

    return value_and_grad


def _none(setup: Setup, model: Model) -> Callable:
    del setup

    def value_and_grad(weights, side, keys):
        # One repeat and one rank: dims 0 and 1 of the stages become one dim of stages.
        flat = weights | {"stages": jax.tree.map(lambda x: x[0], weights["stages"])}
        keys = jax.tree.map(lambda x: x[0], keys)
        value, grads = unpipelined.value_and_grad(model, flat, side, keys)
        return value, grads | {"stages": jax.tree.map(lambda x: x[None], grads["stages"])}

    return value_and_grad


def _linen(setup: Setup, model: Model) -> Callable:
    rim = flax_decoder()
    return rim.linen_value_and_grad(rim.decoder_of(setup, model))


def _nnx(setup: Setup, model: Model) -> Callable:
    rim = flax_decoder()
    return rim.nnx_value_and_grad(rim.decoder_of(setup, model))


ENGINES: dict[str, Callable[[Setup, Model], Callable]] = {
    "none": _none,
    "circular": _circular,
    "scheduled": _scheduled,
    "linen": _linen,
    "nnx": _nnx,
}


def engine_name(setup: Setup) -> str:
    """`pipeline_engine`, or the rim whose modules run in it."""
    rims = {None: setup.config.pipeline_engine, False: "linen", True: "nnx"}
    return rims[setup.config.enable_nnx]


def _dropout_keys(setup: Setup, step: Int[Array, ""]) -> PyTree:
    """[R, S, layers per stage] keys of this step by layer number, or () without dropout."""
    layout = setup.layout
    keys = layer_keys(setup, step, layout.numbers)
    return present_layers(setup, jax.tree.map(lambda x: x.reshape(layout.dims), keys))


def present_layers(setup: Setup, keys: PyTree) -> PyTree:
    """What stages are given: their `keys`, and which layers are there, if not all are."""
    layout = setup.layout
    if not layout.counts:
        return keys
    present = jnp.asarray(layout.numbers) >= 0
    return {"dropout": keys, "present": present.reshape(layout.dims)}
