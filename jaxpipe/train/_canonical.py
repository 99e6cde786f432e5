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

from .. import models, sharding
from ..sharding import LogicalAxes
from ._mpmd import put_on_ranks, state_places
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

    The copy is as large as the state and lies beside it on the devices until it is written. Of
    stages that lie apart it lies in host memory.
    """
    if setup.stages_apart:
        return _joined
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
    """A state laid out for this run, of a canonical one with any number of layers after."""
    if setup.stages_apart:
        return put_on_ranks(_apart(setup, jax.device_get(canonical)), state_places(setup))

    numbers = np.asarray(setup.layout.numbers)

    def stack_leaf(x: jax.Array, leaf: jax.ShapeDtypeStruct, axes: LogicalAxes) -> jax.Array:
        if setup.layout.stages and _is_stacked(axes):
            x = models.where_present(x[numbers], numbers)
        return x.reshape(leaf.shape)

    def stack(canonical: State) -> State:
        cut = _regrouped(canonical, setup.layout.num_layers)
        return jax.tree.map(stack_leaf, cut, state_shapes(setup), state_axes(setup))

    return _compiled(setup, stack, state_shardings(setup))(canonical)


def _joined(state: State) -> State:
    """A canonical copy, in host memory, of a state whose stages lie apart."""

    def of_weights(w: dict[str, Any]) -> dict[str, Any]:
        stages = jax.tree.map(
            lambda *leaves: np.concatenate(list(map(np.asarray, leaves))), *w["stages"]
        )
        return w | {"stages": stages}

    state = _map_weights(of_weights, state)
    # A copy of the others too: what `numpy.asarray` gives may be memory that the next step takes.
    return jax.tree.map(np.array, state)


def _apart(setup: Setup, canonical: State) -> State:
    """A state in host memory whose stages lie apart."""

    def of_weights(w: dict[str, Any]) -> dict[str, Any]:
        layers = setup.layout.layers_of_stages
        return w | {"stages": [_cut(w["stages"], numbers) for numbers in layers]}

    cut = _regrouped(canonical, setup.layout.num_layers, np.concatenate)
    return _map_weights(of_weights, cut)


def _cut(tree: PyTree, numbers: range) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[numbers.start : numbers.stop], tree)


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


def _regrouped(state: State, num_layers: int, concatenate: Callable = jnp.concatenate) -> State:
    """A canonical state with `num_layers` in its stages and the others after them."""

    def of_weights(w: dict[str, Any]) -> dict[str, Any]:
        head = {name: leaf for name, leaf in w["head"].items() if name != "layers"}
        parts = [w["stages"], w["head"]["layers"]] if "layers" in w["head"] else [w["stages"]]
        layers = jax.tree.map(lambda *leaves: concatenate(leaves), *parts)
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
