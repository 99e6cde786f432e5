"""Runs an NNX stage as a pure function, and decides how its variables are handled.

Weights are all variables except random state and sown values. A call may only read weights. Random
state is seeded anew for every stage and microbatch. Values that a stage sows are returned once per
stage and microbatch. A stage must not update a variable for its next call: that would be the call
for the next microbatch, and microbatches are in different stages at the same time.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.spmd import logical_axis_rules
from flax.linen import fp8_ops
from jaxtyping import PyTree

from .._settings import AxisRules
from .._stages import Stage, outputs_of
from ._sown import call, captured_types, without_sown
from ._stacked import without_names


def weights_of(state: PyTree) -> dict[str, Any]:
    """Returns the arrays by the path of their variable, such as "mlp.up.kernel"."""
    return {_name(path): v.get_value() for path, v in nnx.to_flat_state(state)}


def _name(path: tuple) -> str:
    return ".".join(map(str, path))


def overwritten_in(state: PyTree) -> tuple[str, ...]:
    """Returns the paths of variables that a step overwrites with their gradient, as FP8 scales.

    Flax has no common type for them. They are recognized by the name of their type, which is that
    of Linen's collection or `OverwriteWithGradient`.
    """
    names = ("OverwriteWithGradient", fp8_ops.OVERWRITE_WITH_GRADIENT)
    return tuple(_name(path) for path, v in nnx.to_flat_state(state) if type(v).__name__ in names)


def with_weights(state: PyTree, weights: dict[str, Any]) -> PyTree:
    """Returns `state` with the arrays in `weights`; it inverts `weights_of`."""
    flat = [(path, v.replace(weights[_name(path)])) for path, v in nnx.to_flat_state(state)]
    return nnx.from_flat_state(flat)


def stage_function(
    layers: nnx.Module,
    stacked: Sequence[str],
    rules: AxisRules | None,
    records: bool,
    *options: Any,
) -> Stage:
    """Returns a stage as a function `(weights, x, batch_inputs, keys) -> (y, sown)`.

    Its call is `(inputs, segment_ids, positions, deterministic, model_mode)`, and it runs under
    `rules`, or those in context. `stacked` are the names of the dims over which the variables of
    `layers` are stacked. Changing a variable other than by `sow` is a `ValueError`.
    """
    graph, counts, _, weight_state = nnx.split(without_sown(layers), nnx.RngCount, nnx.RngKey, ...)
    names = list(weights_of(counts))
    weight_state = without_names(weight_state, stacked)
    types = captured_types(layers)

    def apply(weights, x, batch_inputs, keys):
        zeros = with_weights(counts, {name: jnp.zeros((), jnp.uint32) for name in names})
        stage = nnx.merge(graph, with_weights(weight_state, weights), zeros, keys or nnx.State({}))
        with nullcontext() if rules is None else logical_axis_rules(rules):
            y, sown = call(
                stage, types, x, batch_inputs["segment_ids"], batch_inputs["positions"], *options
            )
        check_unchanged(weights, weights_of(nnx.state(stage, nnx.Not(nnx.RngState))))
        return outputs_of(y, x), sown if records else {}

    return apply


def check_unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raises a `ValueError` if a call set or created a variable other than by `sow`."""
    is_unchanged = lambda name: name in before and is_same(before[name], after[name])  # noqa: E731
    changed = sorted(name for name in after if not is_unchanged(name))
    if changed:
        raise ValueError(
            f"A layer's call changes its variables {changed}, so that its next call may read them. "
            "In a pipeline that would be the next microbatch, which other stages already work on. "
            "Switch that off (running statistics: `use_running_average=True`); what layers report "
            "is sown as `nnx.Intermediate`."
        )


def is_same(before: Any, after: Any) -> bool:
    """Returns whether two trees have the very same arrays, which may be traced."""
    a, b = jax.tree.leaves(before), jax.tree.leaves(after)
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def draw_keys(layers: nnx.Module, *, advance: bool) -> Any:
    """Returns stored keys of all random streams, or (); `advance` increments their counts."""
    counts, keys, _ = nnx.state(layers, nnx.RngCount, nnx.RngKey, ...)
    counts_by_name = weights_of(counts)
    drawn = [
        (
            path,
            key.replace(_fold_each(key.get_value(), counts_by_name[_name((*path[:-1], "count"))])),
        )
        for path, key in nnx.to_flat_state(keys)
    ]
    if advance:
        nnx.update(layers, jax.tree.map(lambda count: count + jnp.uint32(1), counts))
    return nnx.from_flat_state(drawn) if drawn else ()


def _fold_each(keys: jax.Array, counts: jax.Array) -> jax.Array:
    fold_in = jax.random.fold_in
    for _ in keys.shape:  # a reshape would lose how explicit axes split the keys
        fold_in = jax.vmap(fold_in)
    return fold_in(keys, counts)
