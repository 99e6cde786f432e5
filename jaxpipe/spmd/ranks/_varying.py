"""Arrays that vary over manual axes, and what loops are made of: `cond`, zeros, masked layers."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from ...ir.graph import copies_in_conditionals, pvary_like, run_once_if
from ...sharding import match_varying_axes, varying_axes
from ...sharding.specs import axes_of


def pvary(x: jax.Array) -> jax.Array:
    """Returns an array that devices share, marked as varying over all manual axes.

    It is called on the arguments of `shard_map`, so that a gradient is summed over devices once.
    Otherwise JAX sums at every use, in a loop in every iteration, and in the dtype of the use.
    """
    missing = tuple(set(jax.sharding.get_abstract_mesh().manual_axes) - varying_axes(x))
    if not missing:
        return x
    # The transpose is a psum. XLA:CPU aborts on those of bfloat16 ("Invalid binary instruction
    # opcode copy", in AllReducePromotion, jax 0.10.2), and float32 is more precise.
    widened = x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
    return jax.lax.pcast(widened, missing, to="varying").astype(x.dtype)


def cond(
    predicate: Any, yes: Callable, no: Callable, *operands: Any, like: Any, hint: str = ""
) -> Any:
    """Returns `yes(*operands)` or `no(*operands)`; on a mesh only the chosen branch runs.

    Results vary over the manual axes as the leaves of `like`, a tree as both return. `hint` is a
    name scope of `execution_count_hint`, by which audits of the compiled program read how often
    `yes` runs.
    """
    types = jax.tree.map(jax.typeof, like)

    def branch(f: Callable) -> Callable:
        # Always at least two results: XLA's verifier compares how the branches of a conditional
        # split a result that is no tuple ("Inconsistent conditional sharding").
        return lambda *operands: (jax.tree.map(pvary_like, types, f(*operands)), jnp.int32(0))

    with jax.named_scope(hint) if hint else nullcontext():
        result, second = jax.lax.cond(predicate, branch(yes), branch(no), *operands)
    leaves, tree = jax.tree.flatten(result)
    if len(leaves) == 1:
        leaves = jax.lax.optimization_barrier((*leaves, second))[:1]  # or JAX drops it
    return jax.tree.unflatten(tree, leaves)


ON_ALL_RANKS = "on_all_ranks"
"""The name scope of a branch that all ranks take in the same ticks, so that it may communicate."""


def update_if(predicate: Any, update: Callable, state: Any, *, hint: str = "") -> Any:
    """Returns `update(state)` if `predicate` is true, else `state`: large arrays are not copied.

    XLA:GPU copies all that a conditional returns. What a loop carries it changes in place, so there
    it is a loop of at most one iteration. `hint` is as in `cond`.
    """
    if copies_in_conditionals():
        return run_once_if(predicate, update, state, hint=hint)
    return cond(predicate, update, lambda state: state, state, like=state, hint=hint)


def execution_count_hint(
    table: Sequence[Sequence[int]], chosen: Callable[[int], bool] = lambda entry: entry >= 0
) -> str:
    """Returns `taken_{count}_of_{num_ticks}`: how often a condition holds on the busiest rank.

    `table` is [num_ticks, num_ranks].
    """
    most = max(sum(map(chosen, column)) for column in zip(*table, strict=True))
    return f"taken_{most}_of_{len(table)}"


def zeros(x: Any, *, lead: tuple[int, ...] = (), dtype: Any = None) -> jax.Array:
    """Returns zeros [*lead, *x.shape] that vary over the axes of `x`, as a scan's carry must."""
    dtype = dtype or x.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):  # of which `jnp.zeros` knows nothing
        return pvary(jax.lax.full((*lead, *x.shape), 0, dtype))
    if not isinstance(x, jax.Array):
        return pvary(split_like(x, jnp.zeros((*lead, *x.shape), dtype)))
    zero = match_varying_axes(x, jnp.zeros_like(x, dtype=dtype))
    return jnp.broadcast_to(zero, (*lead, *x.shape))


def zeros_like(tree: PyTree) -> PyTree:
    """Returns `zeros` of every leaf of a tree."""
    return jax.tree.map(zeros, tree)


def split_like(aval: Any, x: jax.Array) -> jax.Array:
    """Reshards the last dims of `x` over explicit axes as those of `aval` are."""
    split = getattr(aval, "sharding", None)
    if not isinstance(split, NamedSharding) or not axes_of(split.spec):
        return x
    dims = (*[None] * (x.ndim - aval.ndim), *split.spec.partitions)
    return jax.sharding.reshard(x, split.spec.update(partitions=dims))


def masked_layer(layer: Callable) -> Callable:
    """Returns a layer that is the identity where its key says that it is padding.

    Stages with different numbers of layers then run the same program.

    Args:
        layer: `(weights, x, batch_inputs, key) -> (x, aux)`.

    Returns:
        `(weights, x, batch_inputs, key) -> (x, aux)` with `key = {"layer_mask": a boolean,
        "dropout": key of the layer}`. Where the mask is false, the layer is padding: it returns x,
        and zeros for aux.
    """

    def masked(
        weights: PyTree, x: PyTree, batch_inputs: PyTree, key: dict[str, PyTree], *past: PyTree
    ):
        arguments = weights, x, batch_inputs, key["dropout"], *past
        _, aux_shapes = jax.eval_shape(layer, *arguments)
        zero_aux = zeros_like(aux_shapes)
        return cond(
            key["layer_mask"],
            lambda: layer(*arguments),
            lambda: (x, zero_aux),
            like=(x, zero_aux),
        )

    return masked
