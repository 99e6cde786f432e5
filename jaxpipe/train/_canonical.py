"""A state without its pipeline: layers in forward order, [L, ...], whatever ranks they lay on.

This is what checkpoints hold, so that any layout and engine can go on from them. Layers after the
pipeline stay apart, and are put with the others only for a run that divides the layers otherwise.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .. import models, mpmd, sharding
from ..sharding import LogicalAxes
from ._apart import (
    layers_of_ranks,
    mpmd_mesh,
    stack_of_stages,
    stack_shardings,
    stages_of_stack,
)
from ._mpmd import state_places
from ._setup import STACKED, Setup
from ._state import State, state_axes, state_shapes, state_shardings


def canonical_shapes(setup: Setup) -> PyTree[jax.ShapeDtypeStruct]:
    """Shapes and shardings of a canonical state. Layers are split over the ranks if they divide."""
    setup = _together(setup)
    num_ranks, num_layers = setup.mesh.shape["stage"], setup.layout.num_layers
    shapes, axes = state_shapes(setup), state_axes(setup)
    flat = jax.tree.map(
        lambda leaf, a: jax.ShapeDtypeStruct(_flat_shape(leaf.shape, a, num_layers), leaf.dtype),
        shapes,
        axes,
    )
    flat_axes = jax.tree.map(lambda leaf, a: _flat_axes(leaf.shape, a, num_ranks), flat, axes)
    where = sharding.named_shardings(flat, flat_axes, setup.mesh, setup.rules)
    return jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), flat, where
    )


def make_canonical(setup: Setup) -> Callable[[State], State]:
    """A function that makes a canonical copy of a state; it compiles at its first call.

    The copy is as large as the state and lies beside it on the devices until it is written.
    """
    if setup.stages_apart:
        return _make_joined(setup)
    shapes = canonical_shapes(setup)
    where = jax.tree.map(lambda leaf: leaf.sharding, shapes)

    numbers = np.asarray(setup.layout.numbers)
    absent = np.sum(numbers < 0)
    places = np.argsort(numbers, stable=True)[absent:]

    def flatten_leaf(x: jax.Array, leaf: jax.ShapeDtypeStruct, axes: LogicalAxes) -> jax.Array:
        if not setup.layout.stages or not _is_stacked(axes):
            return x.reshape(leaf.shape)
        return x.reshape(-1, *leaf.shape[1:])[places]

    def flatten(state: State) -> State:
        return jax.tree.map(flatten_leaf, state, shapes, state_axes(setup))

    return _compiled(setup, flatten, where)


def from_canonical(setup: Setup, canonical: State) -> State:
    """A state laid out for this run, of a canonical one with any number of layers after.

    Of a part of it, such as the weights, the same part.
    """

    def part(state: State) -> State:
        return {name: state[name] for name in canonical}

    if setup.stages_apart:
        return _apart(setup, canonical)

    numbers = np.asarray(setup.layout.numbers)

    def stack_leaf(x: jax.Array, leaf: jax.ShapeDtypeStruct, axes: LogicalAxes) -> jax.Array:
        if setup.layout.stages and _is_stacked(axes):
            x = models.where_present(x[numbers], numbers)
        return x.reshape(leaf.shape)

    def stack(canonical: State) -> State:
        cut = _regrouped(canonical, setup.layout.num_layers)
        return jax.tree.map(stack_leaf, cut, part(state_shapes(setup)), part(state_axes(setup)))

    return _compiled(setup, stack, part(state_shardings(setup)))(canonical)


def _make_joined(setup: Setup) -> Callable[[State], State]:
    """`make_canonical` of states whose stages lie apart."""
    places, mesh = state_places(setup), mpmd_mesh(setup)
    where = jax.tree.map(lambda leaf: leaf.sharding, canonical_shapes(setup))
    numbers = layers_of_ranks(setup).ravel()
    order = np.argsort(numbers, stable=True)[np.sum(numbers < 0) :]

    def stack(of_stages: dict[str, Any], places: dict[str, Any], where: dict[str, Any]) -> Any:
        ends = {
            name: mpmd.mpmd_to_spmd_reshard(mesh, of_stages[name], where[name])
            for name in of_stages
            if name != "stages"
        }
        return ends | {"stages": stack_of_stages(setup, of_stages["stages"], places["stages"])}

    def in_order(w: dict[str, Any]) -> dict[str, Any]:
        stages = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[order], w["stages"])
        return w | {"stages": stages}

    put_in_order = _compiled(setup, lambda state: _map_weights(in_order, state), where)

    def join(state: State) -> State:
        return put_in_order(
            jax.tree.map(
                lambda x, *others: (
                    stack(x, *others)
                    if _is_weights(x)
                    else mpmd.mpmd_to_spmd_reshard(mesh, x, others[1])
                ),
                state,
                places,
                where,
                is_leaf=_is_weights,
            )
        )

    return join


def _apart(setup: Setup, canonical: State) -> State:
    """`from_canonical` for stages that lie apart."""
    mesh, of_state = mpmd_mesh(setup), state_places(setup)
    places = {name: of_state[name] for name in canonical}
    numbers = np.maximum(layers_of_ranks(setup), 0)

    def everywhere(place: mpmd.MpmdSharding) -> NamedSharding:
        return NamedSharding(setup.mesh, place.spec)

    def of_stack(places: dict[str, Any]) -> dict[str, Any]:
        ends = {name: places[name] for name in places if name != "stages"}
        stages = stack_shardings(setup, places["stages"])
        return jax.tree.map(everywhere, ends) | {"stages": stages}

    def stack(canonical: State) -> State:
        cut = _regrouped(canonical, setup.layout.num_layers)
        return _map_weights(
            lambda w: w | {"stages": jax.tree.map(lambda x: x[numbers], w["stages"])}, cut
        )

    def part(stacked: Any, places: Any) -> Any:
        if not _is_weights(stacked):
            return mpmd.spmd_to_mpmd_reshard(mesh, stacked, places)
        ends = {
            name: mpmd.spmd_to_mpmd_reshard(mesh, stacked[name], places[name])
            for name in stacked
            if name != "stages"
        }
        return ends | {"stages": stages_of_stack(setup, stacked["stages"], places["stages"])}

    where = jax.tree.map(
        lambda x: of_stack(x) if _is_weights(x) else everywhere(x), places, is_leaf=_is_weights
    )
    stacked = _compiled(setup, stack, where)(canonical)
    return jax.tree.map(part, stacked, places, is_leaf=_is_weights)


def _together(setup: Setup) -> Setup:
    """`setup`, with stages that lie apart as one stack of layers instead."""
    if not setup.stages_apart:
        return setup
    config = setup.config.model_copy(update={"pipeline_engine": "none"})
    layout = sharding.Layout(1, 1, setup.layout.num_layers)
    return dataclasses.replace(setup, config=config, layout=layout)


def _compiled(setup: Setup, f: Callable[[State], State], where: PyTree) -> Callable:
    """`f` for states on `setup.mesh`, whose explicit axes do not follow when layers move."""
    work: Any = f
    if setup.config.shard_mode == "explicit":
        work = jax.sharding.auto_axes(f, out_sharding=jax.tree.map(_on_explicit_axes, where))
    compiled = jax.jit(work, out_shardings=where)

    def run(state: State) -> State:
        with jax.set_mesh(setup.mesh):
            return compiled(state)

    return run


def _on_explicit_axes(where: NamedSharding) -> NamedSharding:
    """What a type says of `where`."""
    kinds = dict(zip(where.mesh.axis_names, where.mesh.axis_types, strict=True))

    def explicit(dim: Any) -> tuple[str, ...] | None:
        names = (dim,) if isinstance(dim, str) else dim or ()
        return tuple(name for name in names if kinds[name] is AxisType.Explicit) or None

    return NamedSharding(where.mesh, PartitionSpec(*map(explicit, where.spec)))


def with_layers_after(setup: Setup, layers_after: int) -> Setup:
    """`setup`, if that many layers ran after a pipeline that is one stage."""
    if layers_after == setup.layers_after:
        return setup
    num_layers = setup.layout.num_layers + setup.layers_after - layers_after
    return dataclasses.replace(setup, layout=sharding.Layout(1, 1, num_layers))


def _regrouped(state: State, num_layers: int) -> State:
    """A canonical state with `num_layers` in its stages and the others after them."""

    def of_weights(w: dict[str, Any]) -> dict[str, Any]:
        head = {name: leaf for name, leaf in w["head"].items() if name != "layers"}
        parts = [w["stages"], w["head"]["layers"]] if "layers" in w["head"] else [w["stages"]]
        layers = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
        if any(leaf.shape[0] > num_layers for leaf in jax.tree.leaves(layers)):
            head["layers"] = jax.tree.map(lambda leaf: leaf[num_layers:], layers)
        stages = jax.tree.map(lambda leaf: leaf[:num_layers], layers)
        return w | {"head": head, "stages": stages}

    return _map_weights(of_weights, state)


def _map_weights(f: Callable[[dict[str, Any]], dict[str, Any]], state: State) -> State:
    """`f` of a state's weights and of Adam's moments of them."""
    return jax.tree.map(lambda x: f(x) if _is_weights(x) else x, state, is_leaf=_is_weights)


def _is_weights(x: Any) -> bool:
    """Whether `x` is a state's weights, or Adam's moments of them."""
    return isinstance(x, dict) and {"head", "stages"} <= x.keys()


def _is_stacked(axes: Any) -> bool:
    return axes[: len(STACKED)] == STACKED


def _flat_shape(shape: tuple[int, ...], axes: LogicalAxes, num_layers: int) -> tuple[int, ...]:
    return (num_layers, *shape[len(STACKED) :]) if _is_stacked(axes) else shape


def _flat_axes(shape: tuple[int, ...], axes: LogicalAxes, num_ranks: int) -> LogicalAxes:
    if not _is_stacked(axes):
        return axes
    return ("layers" if shape[0] % num_ranks else "stage", *axes[len(STACKED) :])
