"""A train step around any engine's gradients: clipping, the optimizer of a run, and metrics."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from ...api.optimizer import StoredState
from ..optim._optimizer import clip_by_norm, gradient_norm
from ..optim._router_bias import drop_router_biases, update_router_biases
from ..plan._optimizer import (
    Groups,
    layer_of,
    learning_rate,
    make_optimizer,
    optimizer_of,
    user_tree,
    user_tree_of,
)
from ..plan._setup import StepPlan
from ._optimizer_state import by_path, nest
from ._state import TrainState

Reshard = Callable[[PyTree], PyTree]


def make_optimizer_step(
    plan: StepPlan,
    value_and_grad: Callable,
    *,
    shard: Reshard = lambda weights: weights,
    gather_updates: Reshard = lambda updates: updates,
) -> Callable[[TrainState, PyTree], tuple[TrainState, dict[str, Array]]]:
    """Builds `(state, batch) -> (state, metrics)` from gradients; the caller compiles it."""
    config = plan.state.config
    update, schedule = _make_update(plan), learning_rate(config)

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Array]]:
        weights = state["weights"]
        (loss, metrics), grads = value_and_grad(weights, batch, state["step"])
        trained, trained_grads = drop_router_biases(weights), drop_router_biases(grads)
        norm = gradient_norm(trained_grads)
        threshold = config.gradient_clipping_threshold
        trained_grads = clip_by_norm(trained_grads, norm, threshold=threshold)
        with jax.named_scope("optimizer"):
            updates, optimizer_state = update(trained_grads, state["optimizer"], shard(trained))
        # XLA would add ZeRO-1's updates to a part of the weights and gather the sums, for which it
        # copies all weights: 7.0 of 32.2 GB of llama2-7b on v5p:2x2x2 with libtpu 0.0.48.1.
        trained = optax.apply_updates(trained, gather_updates(updates))
        bias_rate = config.routed_bias_update_rate
        new = {
            "weights": update_router_biases(trained, weights, grads, rate=bias_rate),
            "optimizer": optimizer_state,
        }
        skips = config.bad_step_policy == "skip"
        rate = jnp.asarray(schedule(_num_updates(state) if skips else state["step"]))
        all_metrics = {"loss": loss, **metrics, "gradient_norm": norm, "learning_rate": rate}
        if skips:
            is_usable = _is_usable(loss, norm, config.max_gradient_norm)
            new = _select(is_usable, new, {name: state[name] for name in new})
            all_metrics["skipped"] = 1 - is_usable.astype(jnp.float32)
        return new | {"step": state["step"] + 1}, all_metrics

    return step


def _num_updates(state: TrainState) -> Int[Array, ""]:
    """Returns the steps that were not skipped, by which the optimizer finds its rate."""
    counts = optax.tree_utils.tree_get_all_with_path(state["optimizer"], "count")
    return counts[0][1] if counts else state["step"]


def _is_usable(loss: Float[Array, ""], norm: Float[Array, ""], limit: float) -> Bool[Array, ""]:
    """Returns whether loss and norm are finite, and the norm at most `limit` unless that is 0."""
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    return finite & (norm <= limit) if limit else finite


def _select(first: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    # An array that the optimizer returns unchanged, such as prodigy's first weights, stays the same
    # object: programs of ranks then need not read it.
    return jax.tree.map(lambda x, y: y if x is y else jnp.where(first, x, y), new, old)


Update = Callable[[Groups, PyTree, Groups], tuple[Groups, PyTree]]


def _make_update(plan: StepPlan) -> Update:
    """Returns `(gradients, state, weights) -> (updates, state)`, all in groups and trained."""
    if plan.state.config.optimizer == "adamw":
        return _direct_update(plan)
    return _lifted_update(plan)


def _direct_update(plan: StepPlan) -> Update:
    """Returns the update of an optimizer of single elements, which may see stored stacks as arrays.

    It is traced faster than `_lifted_update`. For AdamW both give the same bits, but for ZeRO-1,
    where norms of gradients differ in the last one.
    """
    config = plan.state.config
    tree = user_tree_of(plan.state.weights.abstract_unstacked, 1, config.optimizer)
    if plan.state.weights.per_stage:
        stages = [tree["layers"]] * len(plan.state.weights.layout.stage_layer_ids)
        tree = tree | {"layers": stages}
    optimizer = optimizer_of(config, tree)

    def renamed(tree: PyTree, old: str, new: str) -> PyTree:
        def groups(node: Any) -> Any:
            if not isinstance(node, dict):
                return node
            return {new if name == old else name: part for name, part in node.items()}

        return jax.tree.map(groups, tree, is_leaf=lambda x: isinstance(x, dict))

    def update(gradients: Groups, state: PyTree, weights: Groups) -> tuple[Groups, PyTree]:
        arguments = (renamed(x, "stages", "layers") for x in (gradients, state, weights))
        return renamed(optimizer.update(*arguments), "layers", "stages")

    return update


def _lifted_update(plan: StepPlan) -> Update:
    """Returns the update of any optimizer, by `optimizer` of the run's pipeline."""
    # Of ZeRO-1 the step shards weights and gathers updates itself.
    pipe = replace(plan.pipe, told=plan.pipe.told.with_options(zero1=False))
    optimizer = pipe.optimizer(make_optimizer(plan.state))
    tree = user_tree(plan.state)
    layers = replace(plan.stored["layers"], in_list=isinstance(tree["layers"], list))
    parts = {"embed": tree["embed"], "head": tree["head"], "stages": layer_of(tree)}

    def stored(groups: Groups) -> dict[str, Any]:
        params = {name: groups[name] for name in ("embed", "head")}
        return params | {"layers": replace(layers, stages=groups["stages"])}

    shapes = drop_router_biases(plan.groups)
    template = jax.eval_shape(optimizer.init, stored(shapes))

    def update(gradients: Groups, state: PyTree, weights: Groups) -> tuple[Groups, PyTree]:
        updates, new = optimizer.update(
            stored(gradients), _to_stored(parts, template, state), stored(weights)
        )
        of_stages = {"stages": updates["layers"].stages}
        groups = {name: updates[name] for name in ("embed", "head")} | of_stages
        return groups, _from_stored(parts, new)

    return update


def _is_stored(x: Any) -> bool:
    return isinstance(x, StoredState)


def _on_group(function: Callable[[PyTree, Any], Any], part: PyTree, group: Any) -> Any:
    """Applies a function to a group, or to every stage of a list of them."""
    if isinstance(group, list):
        return [function(part, stage) for stage in group]
    return function(part, group)


def _to_stored(parts: Groups, template: PyTree, state: PyTree) -> PyTree:
    """Returns a state in groups as the pipeline stores it."""
    nodes, outer = jax.tree.flatten(template, is_leaf=_is_stored)

    def node(like: Any, groups: Any) -> Any:
        if not _is_stored(like):
            return groups
        named = {name: _on_group(by_path, parts[name], groups[name]) for name in like.groups}
        return replace(like, groups=named)

    return outer.unflatten(map(node, nodes, outer.flatten_up_to(state)))


def _from_stored(parts: Groups, state: PyTree) -> PyTree:
    """Returns a state that the pipeline stores in groups."""

    def groups(node: Any) -> Any:
        if not _is_stored(node):
            return node
        return {name: _on_group(nest, parts[name], group) for name, group in node.groups.items()}

    return jax.tree.map(groups, state, is_leaf=_is_stored)
