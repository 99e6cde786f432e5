"""Finds out which inputs of a function an output depends on, and computes that output alone."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import partial_eval
from jaxtyping import PyTree

from .._compat import ClosedJaxpr


def dependent_inputs(function: Callable, *arguments: PyTree) -> tuple[list[PyTree], Any]:
    """Returns the inputs that each leaf of the output depends on, and the structure of the output.

    For a leaf it is a tree like `arguments` of booleans. Arrays may be given as shapes.
    """
    closed, out = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return used_inputs(closed, arguments), jax.tree.structure(out)


def used_inputs(closed: ClosedJaxpr, arguments: PyTree) -> list[PyTree]:
    """Returns for every output of a program what it reads, booleans in a tree like arguments."""
    tree, count = jax.tree.structure(arguments), len(closed.jaxpr.outvars)
    used = []
    for i in range(count):
        _, of_output = partial_eval.dce_jaxpr(closed.jaxpr, [j == i for j in range(count)])
        used.append(jax.tree.unflatten(tree, of_output))
    return used


def restricted(function: Callable, wanted: Sequence[int], *arguments: PyTree) -> Callable:
    """Returns the part of a function that computes the list of some leaves of its output.

    It does not read leaves that these do not depend on: such a leaf may be anything.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    count = len(closed.jaxpr.outvars)
    jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, [i in set(wanted) for i in range(count)])
    run = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))

    def part(*arguments: PyTree) -> list[jax.Array]:
        leaves = jax.tree.leaves(arguments)
        return run(*[x for x, is_used in zip(leaves, used, strict=True) if is_used])

    return part


def pruned(function: Callable, *arguments: PyTree) -> tuple[Callable, PyTree]:
    """Returns a function without equations that its output does not depend on, and what it reads.

    That is a tree like `arguments` of booleans; all other leaves may be anything.
    """
    closed, out = jax.make_jaxpr(function, return_shape=True)(*arguments)
    jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    run, tree = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts)), jax.tree.structure(out)

    def part(*arguments: PyTree) -> PyTree:
        leaves = jax.tree.leaves(arguments)
        read = [x for x, is_used in zip(leaves, used, strict=True) if is_used]
        return jax.tree.unflatten(tree, run(*read))

    return part, jax.tree.unflatten(jax.tree.structure(arguments), used)
