"""The engine `mpmd`: a state whose stages lie apart, and the step that ranks run as programs.

Every rank holds the weights and moments of its own stages, and the ends that it reads.
"""

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, PyTree

from ... import models, mpmd, schedules
from ..plan._model import build_model
from ..plan._rematerialization import remat_of_ticks
from ..plan._setup import Setup, batch_shapes, batch_shardings, weights_shardings
from ._gradient_accumulation import in_loops
from ._init import first_ends, first_layers, layer_keys
from ._optimizer_step import make_step
from ._per_stage_state import mpmd_mesh
from ._state import State, state_shapes, state_shardings


def make_mpmd_step(setup: Setup) -> Callable[[State, PyTree], tuple[State, dict[str, Any]]]:
    """As `make_train_step`."""
    return lambda state, batch: _compiled(setup)(state, batch)


def make_mpmd_eval_step(setup: Setup) -> Callable[[PyTree, PyTree], dict[str, Any]]:
    """`(weights, batch) -> loss and metrics`. The programs are compiled at its first call."""
    assert setup.schedule is not None
    model, schedule = build_model(setup), setup.schedule.schedule

    value = in_loops(partial(mpmd.mpmd_value, model, schedule=schedule), setup.num_calls)

    def step(weights: Any, batch: Any) -> dict[str, Any]:
        loss, metrics = value(weights, batch, ())
        return {"loss": loss, **metrics}

    @cache
    def compiled() -> mpmd.Compiled:
        return mpmd.mpmd_jit_with_loop(
            step,
            mpmd_mesh(setup),
            in_shardings=(weights_shardings(setup), batch_shardings(setup)),
            out_shardings=_everywhere(setup),
            timeout=setup.config.mpmd_timeout_seconds,
        ).compile(models.shapes(setup.weight_tree), batch_shapes(setup))

    return lambda weights, batch: compiled()(weights, batch)


def traced_mpmd_step(
    setup: Setup, state: State, batch: PyTree
) -> tuple[tuple[State, dict[str, Any]], str]:
    """A step, and the JSON of a trace of it beside what its schedule predicts.

    Its metrics have both bubbles too, as shares of the loop.
    """
    (state, metrics), found = mpmd.trace_step(_compiled(setup), state, batch)
    bubbles = {f"bubble_{name}": schedules.bubble_share(line) for name, line in found.items()}
    return (state, metrics | bubbles), schedules.to_trace(found, microseconds=1e6)


def initial_mpmd_state(setup: Setup) -> State:
    """As `initial_state`. No device ever holds more than its own part."""
    where = state_places(setup)
    leaves, tree = jax.tree.flatten(where)
    mesh = leaves[0].mpmd_mesh
    found: list[dict[int, jax.Array]] = [{} for _ in leaves]
    for rank in mesh.local_ranks:
        mine = [i for i, leaf in enumerate(leaves) if rank in leaf.mpmd_idxs]
        make = jax.jit(
            partial(_first_leaves, setup, where, rank),
            out_shardings=[leaves[i].of_rank(rank) for i in mine],
        )
        with jax.set_mesh(mesh.unstack[rank]):
            for i, array in zip(mine, make(), strict=True):
                found[i][rank] = array
    shapes = jax.tree.leaves(state_shapes(setup))
    arrays = [
        mpmd.MpmdArray.of_ranks(of_leaf, place, shape.shape, shape.dtype)
        for shape, place, of_leaf in zip(shapes, leaves, found, strict=True)
    ]
    return tree.unflatten(arrays)


def _first_leaves(setup: Setup, where: PyTree, rank: int) -> list[jax.Array]:
    """What a rank has of the first state: weights as their seed gives them, and zeros."""

    def is_here(places: PyTree) -> bool:
        return any(rank in place.mpmd_idxs for place in jax.tree.leaves(places))

    state, stages = state_shapes(setup), []
    for i, numbers in enumerate(setup.layout.layers_of_stages):
        here = is_here(where["weights"]["stages"][i])
        stages.append(
            first_layers(setup, (len(numbers),), numbers=numbers)
            if here
            else state["weights"]["stages"][i]
        )
    state["weights"] = first_ends(setup) | {"stages": stages}
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(where), strict=True)
    return [
        leaf if isinstance(leaf, jax.Array) else jnp.zeros(leaf.shape, leaf.dtype)
        for leaf, place in pairs
        if rank in place.mpmd_idxs
    ]


def state_places(setup: Setup) -> PyTree[mpmd.MpmdSharding]:
    """The ranks that hold every leaf of a state, and how it is divided there."""
    mesh = mpmd_mesh(setup)
    shardings, tree = jax.tree.flatten(state_shardings(setup))
    inputs = _lowered(setup).code.inputs[: len(shardings)]
    places = [
        mpmd.MpmdSharding(mesh, ranks, sharding.spec)
        for (_, ranks), sharding in zip(inputs, shardings, strict=True)
    ]
    return tree.unflatten(places)


@lru_cache(maxsize=1)
def _compiled(setup: Setup) -> mpmd.Compiled:
    """The step with every action by its name in profiles."""
    return mpmd.annotated(_lowered(setup).compile())


# The state's places, its first numbers and the step all come of one program, which takes a while.
@lru_cache(maxsize=1)
def _lowered(setup: Setup) -> mpmd.Lowered:
    """The step on all ranks, before it is compiled."""
    assert setup.schedule is not None
    model, schedule = build_model(setup), setup.schedule.schedule
    remat, layers = remat_of_ticks(setup.config), setup.layout.layers_of_stages

    call = partial(mpmd.mpmd_value_and_grad, model, schedule=schedule, remat=remat)

    def keys_of(step: Int[Array, ""]) -> list[PyTree]:
        return [layer_keys(setup, step, numbers) for numbers in layers]

    mesh, of_state = mpmd_mesh(setup), state_shardings(setup)
    step = mpmd.mpmd_jit_with_loop(
        make_step(setup, in_loops(call, setup.num_calls), keys_of),
        mesh,
        in_shardings=(of_state, batch_shardings(setup)),
        out_shardings=(of_state, _everywhere(setup)),
        donate_argnums=0,
        timeout=setup.config.mpmd_timeout_seconds,
    )
    return step.lower(state_shapes(setup), batch_shapes(setup))


def _everywhere(setup: Setup) -> mpmd.MpmdSharding:
    """Of metrics: every process reads them."""
    mesh = mpmd_mesh(setup)
    return mpmd.MpmdSharding(mesh, tuple(range(mesh.mpmd_dim)), PartitionSpec())
