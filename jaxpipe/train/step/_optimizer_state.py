"""The state of an optimizer in the groups of weights: embed, stages and head.

What of a state is like the tree of weights that the optimizer sees, such as moments, is stored as
weights are, with stages that stack layers, or a tree for each stage. All else of it is as the
optimizer made it. A weight that has several arrays of state has a dict of them, and one that has
none has None.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.interpreters import partial_eval
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path
from jaxtyping import PyTree

from ...models.weights import is_weight, mask_padding_layers, weight_shapes
from ..optim._router_bias import drop_router_biases
from ..plan._optimizer import Groups, layer_of, user_tree
from ..plan._weight_plan import StatePlan, WeightPlan

LayerIds = np.ndarray | list[np.ndarray]
StageLeaf = Callable[[Any, np.ndarray], Any]
"""From a leaf [L, ...] and the layers of a stack, -1 for padding, to the stack."""


def is_weight_tree(x: Any) -> bool:
    """Returns whether `x` has the groups of the weights, as moments of an optimizer have."""
    return isinstance(x, dict) and {"embed", "head", "stages"} <= x.keys()


def optimizer_state_shapes(plan: StatePlan, optimizer: optax.GradientTransformation) -> PyTree:
    """Returns the shapes of a state in groups."""
    tree = user_tree(plan)
    state = jax.eval_shape(optimizer.init, weight_shapes(tree))

    def stack(x: Any, layer_ids: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*layer_ids.shape, *x.shape[1:]), x.dtype)

    return in_groups(tree, _layer_ids(plan.weights), state, stack)


def init_optimizer_state(
    plan: StatePlan, optimizer: optax.GradientTransformation, arrays: Groups
) -> PyTree:
    """Returns the first state in groups, for weights in groups; it is traced.

    If a state does not depend on weights, they are not read, and may be anything.
    """
    tree = user_tree(plan)
    if reads_weights(plan, optimizer):
        user = _to_user(plan.weights, drop_router_biases(arrays), tree)
    else:
        user = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), weight_shapes(tree))

    def stack(x: jax.Array, layer_ids: np.ndarray) -> jax.Array:
        # Not a gather: of zeros XLA computes one while it compiles, number by number.
        rows = [x[max(i, 0)] for i in layer_ids.ravel().tolist()]
        flat = mask_padding_layers(jnp.stack(rows) if rows else x[:0], layer_ids)
        return flat.reshape(*layer_ids.shape, *x.shape[1:])

    return in_groups(tree, _layer_ids(plan.weights), optimizer.init(user), stack)


def reads_weights(plan: StatePlan, optimizer: optax.GradientTransformation) -> bool:
    """Returns whether the first state of an optimizer depends on values of the weights."""
    program = jax.make_jaxpr(optimizer.init)(weight_shapes(user_tree(plan))).jaxpr
    return any(partial_eval.dce_jaxpr(program, [True] * len(program.outvars))[1])


def of_weights(weights: Groups, values: Groups, state: PyTree, default: Callable) -> PyTree:
    """Returns a tree like a state in groups, with the value of the weight that a leaf is like.

    Leaves that are like no weight are `default(leaf, group or None)`.
    """

    def node_values(node: Any) -> Any:
        if not is_weight_tree(node):
            return default(node, None)

        def of_group(group: str) -> PyTree:
            def of_weight(weight: Any, value: Any, leaves: PyTree) -> PyTree:
                return jax.tree.map(
                    lambda x: value if x.shape == weight.shape else default(x, group), leaves
                )

            return jax.tree.map(
                of_weight, weights[group], values[group], node[group], is_leaf=is_weight
            )

        return {group: of_group(group) for group in node}

    return jax.tree.map(node_values, state, is_leaf=is_weight_tree)


def nest(part: PyTree, leaves: dict[str, Any]) -> PyTree:
    """Returns a tree like `part`, weights of a group or of a layer, from leaves by their paths."""

    def of_weight(path: Any, _: Any) -> Any:
        name = keystr(path)
        if name in leaves:
            return leaves[name]
        inside = {other[len(name) :]: x for other, x in leaves.items() if other.startswith(name)}
        return inside or None

    return tree_map_with_path(of_weight, part, is_leaf=is_weight)


def by_path(part: PyTree, tree: PyTree) -> dict[str, Any]:
    """Returns the leaves of a tree from `nest` by their paths."""
    leaves: dict[str, Any] = {}

    def of_weight(path: Any, _: Any, found: Any) -> None:
        if isinstance(found, dict):
            leaves.update({keystr(path) + name: x for name, x in found.items()})
        elif found is not None:
            leaves[keystr(path)] = found

    tree_map_with_path(of_weight, part, tree, is_leaf=is_weight)
    return leaves


def in_groups(tree: Groups, layer_ids: LayerIds, state: PyTree, stack: StageLeaf) -> PyTree:
    """Returns a state in groups, from the state for a tree from `user_tree`."""
    structure = jax.tree.structure(tree, is_leaf=is_weight)

    def is_like(x: Any) -> bool:
        try:
            structure.flatten_up_to(x)
        except (ValueError, TypeError):
            return False
        return True

    def groups(node: Any) -> Any:
        if not is_like(node):
            return node
        leaves = _stacked_leaves(node["layers"])

        def stage(layer_ids: np.ndarray) -> PyTree:
            return nest(layer_of(tree), {name: stack(x, layer_ids) for name, x in leaves.items()})

        stages = [*map(stage, layer_ids)] if isinstance(layer_ids, list) else stage(layer_ids)
        ends = {name: nest(tree[name], _leaves_by_path(node[name])) for name in ("embed", "head")}
        return ends | {"stages": stages}

    return jax.tree.map(groups, state, is_leaf=is_like)


def _stacked_leaves(layers: PyTree) -> dict[str, Any]:
    """Returns leaves [L, ...] by path, arrays or shapes, of a list of layers or of a stack."""
    if not isinstance(layers, list):
        return _leaves_by_path(layers)
    all_leaves = [*map(_leaves_by_path, layers)]
    _check_alike(all_leaves)

    def stacked(name: str, first: Any) -> Any:
        if isinstance(first, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((len(layers), *first.shape), first.dtype)
        return jnp.stack([leaves[name] for leaves in all_leaves])

    return {name: stacked(name, first) for name, first in all_leaves[0].items()}


def _layer_ids(weights: WeightPlan) -> LayerIds:
    """Returns the layer of every slot of the stages."""
    if weights.per_stage:
        return [np.array(ids, int) for ids in weights.layout.stage_layer_ids]
    return weights.slot_layer_ids


def _leaves_by_path(tree: PyTree) -> dict[str, Any]:
    return {keystr(path): leaf for path, leaf in tree_leaves_with_path(tree)}


def _check_alike(layers: Sequence[dict[str, Any]]) -> None:
    for i, leaves in enumerate(layers):
        shapes, first = ({n: x.shape for n, x in of.items()} for of in (leaves, layers[0]))
        if shapes != first:
            names = sorted(n for n in {*shapes, *first} if shapes.get(n) != first.get(n))
            raise ValueError(
                f"`optimizer` has other state for {names[0]} of layer {i} than for that of layer "
                "0. Layers of a pipeline are updated by one program: give a weight the same "
                "transformation in all layers."
            )


def _to_user(weights: WeightPlan, arrays: Groups, tree: Groups) -> Groups:
    """Returns weights in groups as the tree that an optimizer sees."""
    if weights.per_stage:
        ids = [i for stage in weights.layout.stage_layer_ids for i in stage]
        flat = jax.tree.map(lambda *x: jnp.concatenate(x), *arrays["stages"])
    else:
        ids, lead = weights.slot_layer_ids.ravel().tolist(), weights.slot_layer_ids.ndim
        flat = jax.tree.map(lambda x: x.reshape(len(ids), *x.shape[lead:]), arrays["stages"])
    order = np.array([ids.index(i) for i in range(weights.layout.num_layers)])
    layers = jax.tree.map(lambda x: x[order], flat)
    if isinstance(tree["layers"], list):
        layers = [jax.tree.map(lambda x: x[i], layers) for i in range(len(order))]  # noqa: B023
    return {"embed": arrays["embed"], "layers": layers, "head": arrays["head"]}
