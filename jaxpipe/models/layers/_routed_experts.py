"""Routed experts without capacity: no token is dropped, however unevenly tokens choose experts.

Where experts are sharded over devices, each device gathers the tokens of all of these devices and
computes the rows of its own experts. The results of the devices are summed. Any of these tokens may
choose any expert, so buffers have k rows for each of them; tokens are therefore run in chunks.

b sequences, T tokens, n = b * T, D embed, E experts, e experts of a device, k experts chosen by
each token, F width of an expert.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

from ...sharding import (
    Rules,
    automatic_axes,
    expert_axes,
    match_varying_axes,
    on_shards,
    partition_spec,
    rules_without_manual_axes,
)
from ...sharding.specs import axes_of_dim
from ._grouped_matmul import GroupedMatmul, ragged_dot, with_gradients_added

Gated = Callable[[Float[Array, "m F"], Float[Array, "m F"]], Float[Array, "m F"]]
"""`(gate [m, F], up [m, F]) -> [m, F]`: what a gated MLP multiplies by its last matrix."""
Experts = Callable[..., Array]
"""`(weights, x [b, T, D], chosen [b, T, k], shares [b, T, k], **options) -> [b, T, D]`. Weights are
`gate` and `up` [E, D, F] and `down` [E, F, D], and may be `gate_bias`, `up_bias` [E, F] and
`down_bias` [E, D]. Options are `gated`, and `scales_inputs`: whether shares are factors of what
experts are given, and not of their results."""

EXPERT_AXES = {
    **dict.fromkeys(("gate", "up"), ("exp", "embed_no_exp", "mlp")),
    **dict.fromkeys(("gate_bias", "up_bias"), ("exp", "mlp")),
    "down": ("exp", "mlp", "embed_no_exp"),
}
"""The logical axes of the weights that devices multiply by."""

_CLAMP, _SLOPE = 7.0, 1.702


def gated_silu(gate: Float[Array, "m F"], up: Float[Array, "m F"]) -> Float[Array, "m F"]:
    """Returns SwiGLU before its last product (Shazeer, 2020, arXiv 2002.05202)."""
    return jax.nn.silu(gate) * up


def clamped_swiglu(gate: Float[Array, "m F"], up: Float[Array, "m F"]) -> Float[Array, "m F"]:
    """Returns the SwiGLU of gpt-oss before its last product (OpenAI, 2025, arXiv 2508.10925)."""
    gate, up = jnp.minimum(gate, _CLAMP), jnp.clip(up, -_CLAMP, _CLAMP)
    return gate * jax.nn.sigmoid(_SLOPE * gate) * (up + 1)


def routed_experts(
    rules: Rules, grouped_matmul: GroupedMatmul = ragged_dot, *, chunk_rows: int | None = None
) -> Experts:
    """Returns a function that runs each token's experts, on the shards that `rules` define.

    'activation_exp' shards the experts, 'mlp' the width of each. Tokens are run in chunks of so
    many that an expert has `chunk_rows` on average, and the backward computes them again; None: all
    at a time.
    """

    def local(run: Callable, num_experts: int, inputs, constants) -> Float[Array, "1 b T D"]:
        (w, x, shares), (chosen, first_expert) = inputs, constants
        rows, flat = x.reshape(-1, x.shape[2]), (-1, chosen.shape[2])
        flat = rows, chosen.reshape(flat) - first_expert[0], shares.reshape(flat)
        most = chosen.size // (num_experts * chunk_rows) if chunk_rows else 1
        count = num_chunks(rows.shape[0], most)
        return _in_chunks(run, count)(w, *flat).reshape(1, *x.shape)

    def experts(w, x, chosen, shares, **options):
        w = jax.tree.map(lambda leaf: leaf.astype(x.dtype), w)
        shares = shares.astype(x.dtype)
        last_bias = w.pop("down_bias", None)
        assert last_bias is None or not options.get("scales_inputs"), "shares would scale it"
        inputs = (w, x, shares)
        num_experts = w["gate"].shape[0]
        constants = (chosen, jnp.arange(num_experts, dtype=chosen.dtype))
        shard = partial(local, partial(sort_and_multiply, grouped_matmul, **options), num_experts)
        run = _on_all_shards(shard, rules, w) if automatic_axes() else shard
        # What a step's time is estimated by: kernels skip the rows of other devices.
        with jax.named_scope(f"rows_1_of_{_num_shards(rules)}"):
            parts = run(inputs, constants)
        # Not `jnp.sum`: devices would exchange float32 where layers compute in bfloat16.
        y = lax.reduce_sum(parts, axes=(0,))
        # Not on the shards: those of an expert's width would add it once each.
        return y if last_bias is None else y + _weighted_bias(last_bias, chosen, shares)

    return experts


def _weighted_bias(
    bias: Float[Array, "E D"], chosen: Int[Array, "b T k"], shares: Float[Array, "b T k"]
) -> Float[Array, "b T D"]:
    """Returns the sum of the biases of each token's experts, weighted by its shares."""
    is_chosen = chosen[..., None] == jnp.arange(bias.shape[0])
    return jnp.sum(jnp.where(is_chosen, shares[..., None], 0), axis=-2) @ bias


def _num_shards(rules: Rules) -> int:
    """Returns the number of parts into which devices divide the experts that they compute."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape.get(axis, 1) for axis in expert_axes(rules))


def num_chunks(num_tokens: int, at_most: int) -> int:
    """Returns the largest power of 2 that divides `num_tokens` and is at most `at_most`, or 1.

    Example:
        >>> num_chunks(24, at_most=20)
        8
    """
    count = 1
    while 2 * count <= at_most and num_tokens % (2 * count) == 0:
        count *= 2
    return count


def _in_chunks(run: Callable, count: int) -> Callable:
    """Returns `run` for chunks of tokens; the backward computes their intermediate values again.

    Where products add gradients of weights to sums, no gradient of a chunk is stored.
    """
    if count == 1:
        return run

    def split(*arrays: Array) -> tuple[Array, ...]:
        return tuple(x.reshape(count, -1, *x.shape[1:]) for x in arrays)

    @jax.custom_vjp
    def in_chunks(w, x, chosen, shares):
        chunks = split(x, chosen, shares)
        return lax.map(lambda chunk: run(w, *chunk), chunks).reshape(x.shape)

    def backward(arguments, gradient):
        w, x, chosen, shares = arguments

        def step(sums, chunk):
            x, chosen, shares, gradient = chunk
            _, pull_back = jax.vjp(lambda w, x, s: run(w, x, chosen, s, sums=sums), w, x, shares)
            sums, *grads = pull_back(gradient)
            return sums, grads

        chunks = split(x, chosen, shares, gradient)
        # From the last to the first, as JAX's derivative of the loop adds them.
        sums, grads = lax.scan(step, jax.tree.map(jnp.zeros_like, w), chunks, reverse=True)
        dx, dshares = (g.reshape(a.shape) for g, a in zip(grads, (x, shares), strict=True))
        return sums, dx, None, dshares

    in_chunks.defvjp(lambda *arguments: (in_chunks(*arguments), arguments), backward)
    # Devices that share weights have different gradients of them.
    return lambda w, x, *others: in_chunks(match_varying_axes(x, w), x, *others)


def sort_and_multiply(
    grouped_matmul: GroupedMatmul,
    w: PyTree,
    x: Float[Array, "n D"],
    chosen: Int[Array, "n k"],
    shares: Float[Array, "n k"],
    gated: Gated = gated_silu,
    scales_inputs: bool = False,
    sums: dict[str, Array] | None = None,
) -> Float[Array, "n D"]:
    """Sorts tokens by expert, runs the first e experts, and sums the results of each token.

    Experts outside 0 to e - 1 are on other devices and are left out. Gradients of weights are added
    to `sums`.
    """
    num_experts, (n, k), sums = w["gate"].shape[0], chosen.shape, sums or {}
    is_here = (chosen >= 0) & (chosen < num_experts)
    group = jnp.where(is_here, chosen, num_experts).reshape(-1)  # rows of other devices are last
    order = jnp.argsort(group)
    sizes = jnp.sum(group[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)

    # What products return for rows of other devices may be anything. It is not summed: results are
    # masked where the sum of a token reads them, and gradients before they are summed.
    is_ours: Bool[Array, "m 1"] = (jnp.arange(n * k) < jnp.sum(sizes))[:, None]
    rows = _rows(x, order // k)
    if scales_inputs:
        rows *= _rows(shares.reshape(-1, 1), order)
    rows = _with_gradients_where(rows, is_ours)

    def project(name: str) -> Float[Array, "m F"]:
        y = grouped_matmul(rows, w[name], sizes, sums.get(name))
        bias = f"{name}_bias"
        if bias not in w:
            return y
        # A product, not a look-up: its gradient would add rows one by one.
        is_of_expert = group[order][:, None] == jnp.arange(num_experts)
        of_expert = with_gradients_added(w[bias], sums.get(bias))
        return _with_gradients_where(y + is_of_expert.astype(x.dtype) @ of_expert, is_ours)

    gate = checkpoint_name(project("gate"), "moe_mlpwi_0")
    up = checkpoint_name(project("up"), "moe_mlpwi_1")
    out = grouped_matmul(gated(gate, up), w["down"], sizes, sums.get("down"))
    out = checkpoint_name(out, "moe_mlpwo")
    by_token = _rows(out, jnp.argsort(order)).reshape(n, k, -1)
    by_token = jnp.where(is_here[..., None], by_token, jnp.zeros_like(by_token))
    return jnp.sum(by_token if scales_inputs else by_token * shares[..., None], axis=1)


@jax.custom_vjp
def _with_gradients_where(x: Float[Array, "m D"], mask: Bool[Array, "m 1"]) -> Array:
    """Returns `x`, whose gradients are zeros where the mask is false."""
    return x


_with_gradients_where.defvjp(
    lambda x, mask: (x, mask),
    lambda mask, gradient: (jnp.where(mask, gradient, jnp.zeros_like(gradient)), None),
)


def _rows(x: Float[Array, "n D"], index: Int[Array, " m"]) -> Float[Array, "m D"]:
    return x.at[index].get(mode="promise_in_bounds")


def _on_all_shards(local: Callable, rules: Rules, weights: dict[str, Array]) -> Callable:
    """Returns `local` on the shards of all automatic axes, whose leading dim holds partial sums."""
    stored_rules = rules_without_manual_axes(rules, jax.sharding.get_abstract_mesh())
    auto_rules = dict(stored_rules) | {
        "exp": expert_axes(stored_rules),
        "embed_no_exp": (),  # devices compute with the whole of it
    }
    stored, specs = (
        {name: partition_spec(EXPERT_AXES[name], by) for name in weights}
        for by in (stored_rules, [*auto_rules.items()])
    )
    inward = specs["gate"]
    parts = tuple(axis for dim in inward for axis in axes_of_dim(dim))
    # Devices that hold different experts need the same tokens, so they must not shard the tokens.
    token_rules = [(name, [a for a in axes if a not in parts]) for name, axes in auto_rules.items()]
    tokens = partition_spec(("activation_batch", "activation_length", None), token_rules)
    return on_shards(
        local,
        automatic_axes(),
        (specs, tokens, tokens),
        (tokens, PartitionSpec(inward[0])),
        PartitionSpec(parts or None, *tokens),
        (stored, tokens, tokens),
    )
