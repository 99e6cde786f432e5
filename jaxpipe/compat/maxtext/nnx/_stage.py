"""Runs an NNX stage as a pure function, and decides how its variables are handled.

Weights are all variables except random state and sown values. A call may only read weights. Random
state is seeded anew for every stage and microbatch. Values that a stage sows are returned once per
stage and microbatch. A stage must not update a variable for its next call: that would be the call
for the next microbatch, and microbatches are in different stages at the same time.

Under `nnx.capture`, modules store sown values in `__captures__`, separately from their variables.
Otherwise each `sow` creates a variable: an `nnx.Intermediate`, or a variable that holds a tuple.
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
from ._stacked import name_of, without_names


def weights_of(state: PyTree) -> dict[str, Any]:
    """Returns the arrays by the path of their variable, such as "mlp.up.kernel"."""
    return {name_of(path): v.get_value() for path, v in nnx.to_flat_state(state)}


def overwritten_in(state: PyTree) -> tuple[str, ...]:
    """Returns the paths of variables that a step overwrites with their gradient, as FP8 scales.

    Flax has no common type for them. They are recognized by the name of their type, which is that
    of Linen's collection or `OverwriteWithGradient`.
    """
    names = ("OverwriteWithGradient", fp8_ops.OVERWRITE_WITH_GRADIENT)
    return tuple(name_of(path) for path, v in nnx.to_flat_state(state) if type(v).__name__ in names)


def with_weights(state: PyTree, weights: dict[str, Any]) -> PyTree:
    """Returns `state` with the arrays in `weights`; it inverts `weights_of`."""
    flat = [(path, v.replace(weights[name_of(path)])) for path, v in nnx.to_flat_state(state)]
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


def draw_keys(layers: nnx.Module) -> Any:
    """Returns stored keys of all random streams, or (), and increments their counts."""
    counts, keys, _ = nnx.state(layers, nnx.RngCount, nnx.RngKey, ...)
    counts_by_name = weights_of(counts)
    drawn = []
    for path, key in nnx.to_flat_state(keys):
        count = counts_by_name[name_of((*path[:-1], "count"))]
        drawn.append((path, key.replace(_fold_each(key.get_value(), count))))
    nnx.update(layers, jax.tree.map(lambda count: count + jnp.uint32(1), counts))
    return nnx.from_flat_state(drawn) if drawn else ()


def _fold_each(keys: jax.Array, counts: jax.Array) -> jax.Array:
    fold_in = jax.random.fold_in
    for _ in keys.shape:  # a reshape would lose how explicit axes split the keys
        fold_in = jax.vmap(fold_in)
    return fold_in(keys, counts)


def is_sown(path: Any, variable: Any) -> bool:
    """Returns whether `sow` created a variable: it is an `nnx.Intermediate` or holds a tuple."""
    del path
    if isinstance(variable, nnx.Perturbation):
        return False
    return isinstance(variable, nnx.Intermediate) or isinstance(variable.get_value(), tuple)


def captured_types(layers: nnx.Module) -> tuple[type[nnx.Variable], ...]:
    """Returns the types that an `nnx.capture` around the pipeline asks for, or ()."""
    types = tuple(type(variable) for variable in getattr(layers, "__captures__", ()))
    if nnx.Perturbation in types:
        raise ValueError(
            "`nnx.capture` asks for `nnx.Perturbation`. A pipeline hands no values from outside to "
            "single microbatches: capture `nnx.Intermediate`, or differentiate by the inputs."
        )
    return types


def without_sown(layers: nnx.Module) -> nnx.Module:
    """Returns a copy of the module without sown values; the copy shares the arrays."""
    layers = nnx.clone(layers)
    for _, module in nnx.iter_modules(layers):
        if hasattr(module, "__captures__"):
            delattr(module, "__captures__")
    nnx.pop(layers, is_sown)
    return layers


def call(stage: nnx.Module, types: tuple, *arguments: Any) -> tuple[Any, PyTree]:
    """Returns the stage's result and the values that it sows."""
    if not types:
        return stage(*arguments), nnx.pop(stage, is_sown)  # type: ignore[operator]
    y, *sown = nnx.capture(stage, *types)(*arguments)
    return y, nnx.merge_state(*sown)


def store(layers: nnx.Module, sown: PyTree) -> None:
    """Stores the sown values of all stages where each module would have stored its own."""
    if not captured_types(layers):
        nnx.pop(layers, is_sown)
        nnx.update(layers, sown)
        return
    for path, variable in nnx.to_flat_state(sown):
        owner: Any = layers
        for name in path[:-1]:
            owner = getattr(owner, name) if isinstance(name, str) else owner[name]
        owner.sow(type(variable), path[-1], variable.get_value(), lambda _, new: new)
