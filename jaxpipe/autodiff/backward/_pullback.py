"""Splits a stage into a forward and a backward program, and finds the residuals between them.

A pipeline runs the backward of a stage long after its forward, and controls the details itself:
where residuals are stored, when weights are gathered again, and how gradients are accumulated. The
two programs are therefore separate functions of arrays. Weights are never residuals, and neither is
a value that can be computed from weights alone (a cast, a slice): the backward computes it again
instead of storing it for each microbatch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxpr_as_fun
from jax.interpreters import partial_eval
from jaxtyping import PyTree

from ..._compat import ClosedJaxpr
from ...ir.transforms import results_in_parts


@dataclass(frozen=True)
class Pullback:
    """A function and its derivative.

    The cotangent has the structure of `floating(out)`, and gradients that of `floating` inputs.
    """

    # `(weights, x, batch_inputs, rng) -> (out, residuals)`, a list of arrays.
    forward: Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, list[jax.Array]]]
    # `(weights, batch_inputs, rng, residuals, cotangent) -> (dweights, dx, dbatch_inputs)`
    backward: Callable[..., tuple[PyTree, PyTree, PyTree]]


def floating(tree: PyTree) -> PyTree:
    """Returns `tree` with None for leaves without a derivative: integers, booleans, keys."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, tree)


def combine(differentiated: PyTree, tree: PyTree) -> PyTree:
    """Returns `tree` with the leaves of `differentiated` in place of its own, except where None."""
    return jax.tree.map(
        lambda new, old: old if new is None else new,
        differentiated,
        tree,
        is_leaf=lambda x: x is None,
    )


def pullback(
    f: Callable,
    weights: PyTree,
    x: PyTree,
    batch_inputs: PyTree,
    rng: PyTree,
    *,
    in_parts: bool = False,
) -> Pullback:
    """Traces `f(weights, x, batch_inputs, rng) -> out` once, as a forward and a backward.

    `jax.checkpoint` in or around `f` decides which values become residuals. `f` closes over no
    array that is differentiated. Of the other arguments, which are examples, only types are read.
    With `in_parts` out is `(y, aux)`, and the forward returns leaves of y as `InParts` if it can.
    """
    vjp_tree = None

    def traced(weights, x, batch_inputs, rng):
        nonlocal vjp_tree

        def f_of_floating(*differentiated):
            w, h, s = map(combine, differentiated, (weights, x, batch_inputs))
            out = f(w, h, s, rng)
            return floating(out), out

        arguments = map(floating, (weights, x, batch_inputs))
        _, vjp, out = jax.vjp(f_of_floating, *arguments, has_aux=True)
        leaves, vjp_tree = jax.tree.flatten(vjp)
        return out, leaves

    closed, (shape, _) = jax.make_jaxpr(traced, return_shape=True)(weights, x, batch_inputs, rng)
    num_out = len(jax.tree.leaves(shape))
    sizes = [len(jax.tree.leaves(tree)) for tree in (weights, x, batch_inputs, rng)]
    sources = _sources(closed, num_out, sizes)
    saved = [i for i, source in enumerate(sources) if source == "saved"]
    out_tree = jax.tree.structure(shape)
    recompute = _only(closed, [num_out + i for i, s in enumerate(sources) if s == "weights"])

    @cache
    def program() -> Callable[..., list[Any]]:
        if not in_parts:
            return jaxpr_as_fun(closed)
        return results_in_parts(closed, len(jax.tree.leaves(shape[0])))

    def forward(weights, x, batch_inputs, rng):
        values = program()(*jax.tree.leaves((weights, x, batch_inputs, rng)))
        return jax.tree.unflatten(out_tree, values[:num_out]), [values[num_out + i] for i in saved]

    def backward(weights, batch_inputs, rng, residuals, cotangent):
        leaves = [
            *jax.tree.leaves(weights),
            *[None] * sizes[1],
            *jax.tree.leaves((batch_inputs, rng)),
        ]
        recomputed, remaining = iter(recompute(leaves)), iter(residuals)
        vjp_leaves = [
            next(recomputed) if s == "weights" else next(remaining) if s == "saved" else leaves[s]
            for s in sources
        ]
        assert vjp_tree is not None
        return jax.tree.unflatten(vjp_tree, vjp_leaves)(cotangent)

    return Pullback(forward, backward)


def _sources(closed: ClosedJaxpr, num_out: int, sizes: list[int]) -> list[Any]:
    """Returns each residual's source: "saved", "weights" (recomputed), or the index of an input."""
    invars = {var: i for i, var in enumerate(closed.jaxpr.invars)}
    leaves_of_x = range(sizes[0], sizes[0] + sizes[1])

    def source(index: int) -> Any:
        var = closed.jaxpr.outvars[index]
        input_index = None if isinstance(var, Literal) else invars.get(var)
        if input_index is not None and input_index not in leaves_of_x:
            return input_index
        beyond_weights = _used(closed, [index])[1][sizes[0] :]
        return "saved" if any(beyond_weights) else "weights"

    return [source(i) for i in range(num_out, len(closed.jaxpr.outvars))]


def _used(closed: ClosedJaxpr, outputs: list[int]) -> tuple[Any, list[bool]]:
    """Returns the part of a program that some outputs need, and whether it reads each input."""
    is_wanted = [i in outputs for i in range(len(closed.jaxpr.outvars))]
    return partial_eval.dce_jaxpr(closed.jaxpr, is_wanted)


def _only(closed: ClosedJaxpr, outputs: list[int]) -> Callable[[list], list[jax.Array]]:
    """Returns a function of the list of all inputs that computes some of the outputs."""
    jaxpr, used = _used(closed, outputs)
    run = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))
    return lambda inputs: run(*[x for x, use in zip(inputs, used, strict=True) if use])
