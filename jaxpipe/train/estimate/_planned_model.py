"""A model of the trainer as a planner sees it: its weights, and the tensors of a layer.

D embed, H query heads, K key and value heads, C channels of a head, F width of an MLP.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ...models import DeepseekConfig, LlamaConfig, ModelConfig
from ...models.layers import ragged_dot
from ...models.weights import is_weight, num_parameters, weight_shapes
from ...planner import (
    Axes,
    PlannedModel,
    RoutedExperts,
    StateBytes,
    Tensor,
    WeightBytes,
    WeightGroup,
)
from ...sharding import Rules, gathered_rules, partition_spec
from ...sharding.specs import axes_of_dim
from ..config._config import Config
from ..optim._router_bias import drop_router_biases
from ..plan._model import CHUNK_ROWS, ModelPlan
from ..plan._optimizer import optimizer_of, user_tree_of
from ..step._optimizer_state import in_groups, is_weight_tree

_FLOAT32 = 4

SCORES = 2
"""Arrays of scores that attention without a kernel stores, in float32: scores and their softmax."""

_SPLIT = ("tensor",)

_LANES = 128
"""Elements of the last dim of an array that a TPU stores together: dims are padded to a multiple.
Kernels of attention want the channels of a head there."""


def planned_model(
    name: str,
    sizes: ModelConfig,
    num_pipelined: int,
    weights: dict[str, Any],
    model: ModelPlan,
    config: Config,
    *,
    rules: Rules,
) -> PlannedModel:
    """Returns a model of the trainer, with its abstract weights, as a planner sees it."""
    platform = model.attention.platform
    of_tokens = partition_spec(("activation_batch", "activation_norm_length"), rules)[1]
    between = tuple(axis for axis in axes_of_dim(of_tokens) if axis != "context")
    named, unnamed = _tensors(sizes, _LANES if platform == "tpu" else 1, between)
    outer = [weights[name].get("layers", {}) for name in ("embed", "head")]
    stored, read = (jnp.dtype(dtype).itemsize for dtype in (config.weight_dtype, config.dtype))
    weight_bytes = WeightBytes(stored, max(_FLOAT32, stored), read)
    state_of_layer, state_of_boundary = state_bytes(weights, config)
    stores_scores = model.attention.kernel == "dot_product"
    scores = SCORES * stores_scores * model.attention.length * sizes.base_num_query_heads
    moe, routed, expanded = sizes.moe, None, ()
    if moe is not None:
        chosen = moe.router.num_chosen
        routed = RoutedExperts(moe.num_experts, chosen, moe.expert_dim, CHUNK_ROWS)
        if platform == "gpu" and model.grouped_matmul is ragged_dot:
            # XLA:GPU makes a row of each choice of a token for every expert.
            expanded = (Tensor(moe.num_experts * chosen * moe.embed_dim),)
    return PlannedModel(
        name=name,
        layer=_groups(weights["layer"], rules),
        embed=_groups(weights["embed"], rules),
        head=_groups(weights["head"], rules),
        num_layers=num_pipelined,
        hidden=sizes.base_emb_dim,
        vocab=sizes.vocab_size,
        of_layers=weight_bytes,
        of_boundary=weight_bytes,
        state_of_layer=state_of_layer,
        state_of_boundary=state_of_boundary,
        gathered_bytes=read,
        activation_bytes=read,
        platform=platform,
        hoists_casts=platform != "gpu",
        outer=_groups(outer, rules),
        num_outer=sizes.num_blocks - num_pipelined,
        tensors=tuple(named.items()),
        unnamed=unnamed,
        scores=(Tensor(scores, _SPLIT),) if scores else (),
        routed=routed,
        expanded=expanded,
        locations=tuple(model.remat.locations.items()),
        between=between,
    )


def _groups(tree: PyTree, rules: Rules) -> tuple[WeightGroup, ...]:
    """Returns the weights of a tree, those together that the same axes split."""
    sizes_by_axes: dict[tuple[Axes, Axes], list[int]] = {}
    for weight in jax.tree.leaves(tree, is_leaf=is_weight):
        specs = (partition_spec(weight.axes, by) for by in (rules, gathered_rules(rules)))
        stored, gathered = (
            tuple(axis for dim in spec for axis in axes_of_dim(dim)) for spec in specs
        )
        sizes_by_axes.setdefault((stored, gathered), []).append(math.prod(weight.shape))
    return tuple(
        WeightGroup(sum(sizes), stored, gathered, max(sizes))
        for (stored, gathered), sizes in sizes_by_axes.items()
    )


def _tensors(
    sizes: ModelConfig, lanes: int, between: Axes
) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """Returns the tensors that a layer makes for every token: by name, and those without one.

    Channels of a head are padded to a multiple of `lanes`. The axes `between` divide the tokens of
    what is between products.
    """

    def padded(channels: int) -> int:
        return -(-channels // lanes) * lanes

    D, moe, count = sizes.base_emb_dim, sizes.moe, sizes.layers_per_block
    named, unnamed = {"out_proj": Tensor(count * D, between)}, [Tensor(count * 4 * D, between)]
    match sizes:
        case LlamaConfig():
            _, H, K, C = sizes.attention
            C = padded(C)
            named |= _heads(*(count * heads * C for heads in (H, K, K, H)))
            if sizes.use_qk_norm:
                unnamed.append(Tensor(count * (H + K) * C, _SPLIT))
            if sizes.has_post_norms:
                unnamed.append(Tensor(2 * D, between))
        case DeepseekConfig():
            at = sizes.attention
            H = at.num_heads
            keys, values = H * padded(at.head_dim), H * padded(at.v_head_dim)
            named |= _heads(keys, keys, values, values)
            named |= {"mla_q": Tensor(at.q_lora_rank), "mla_kv": Tensor(at.kv_lora_rank)}
    mlps = [sizes.mlp] * (count if moe is None else count - 1)
    if mlps:
        # The activated gate and its product, or what an MLP without a gate activates.
        unnamed.append(Tensor(sum((1 + mlp.has_gate) * mlp.width for mlp in mlps), _SPLIT))
    if moe and moe.shared_mlp:
        mlps.append(moe.shared_mlp)
    for name in mlps[0].tensors if mlps else ():
        channels = sum(mlp.tensors[name] for mlp in mlps)
        named[name] = Tensor(channels, between if name == "mlpwo" else _SPLIT)
    if moe is None:
        return named, tuple(unnamed)
    k, F = moe.router.num_chosen, moe.expert_dim
    for name in ("moe_mlpwi_0", "moe_mlpwi_1"):
        named[name] = Tensor(k * F, _SPLIT, all_rows=True)
    named["moe_mlpwo"] = Tensor(k * D, all_rows=True)
    return named, (*unnamed, Tensor(2 * k * D, all_rows=True))


def _heads(queries: int, keys: int, values: int, context: int) -> dict[str, Tensor]:
    names = ("query_proj", "key_proj", "value_proj", "context")
    sizes = (queries, keys, values, context)
    return {name: Tensor(size, _SPLIT) for name, size in zip(names, sizes, strict=True)}


def state_bytes(weights: dict[str, Any], config: Config) -> tuple[StateBytes, StateBytes]:
    """Returns the bytes of the state for a layer, and for embedding and head."""
    tree = user_tree_of(weights, 1, config.optimizer)
    state = jax.eval_shape(optimizer_of(config, tree).init, weight_shapes(tree))

    def one(x: Any, _: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

    groups = in_groups(tree, np.zeros(1, int), state, one)
    nodes = [x for x in jax.tree.leaves(groups, is_leaf=is_weight_tree) if is_weight_tree(x)]
    layer = drop_router_biases(weights["layer"])
    ends = {name: tree[name] for name in ("embed", "head")}
    return (
        _sum(layer, [node["stages"] for node in nodes]),
        _sum(ends, [{name: node[name] for name in ends} for node in nodes]),
    )


def _sum(weights: PyTree, states: list[PyTree]) -> StateBytes:
    like_weights = whole = 0

    def count(weight: Any, leaves: PyTree) -> None:
        nonlocal like_weights, whole
        for leaf in jax.tree.leaves(leaves):
            size = math.prod(leaf.shape) * leaf.dtype.itemsize
            if leaf.shape == weight.shape:
                like_weights += size
            else:
                whole += size

    for state in states:
        jax.tree.map(count, weights, state, is_leaf=is_weight)
    return StateBytes(like_weights / num_parameters(weights), float(whole))
