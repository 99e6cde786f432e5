"""What the layers of a module, and its output, read of parameters, keys and layers before them."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jaxtyping import PyTree

from ..._compat import ClosedJaxpr
from .._dependence import used_inputs
from ._layer_calls import LayerArguments


class Read(NamedTuple):
    """What an array depends on.

    Attributes:
        outer: Parameters outside of layers.
        key: Whether it depends on a dropout key.
        outputs: Layers, by what they return as x.
        reads_extras: Whether it depends on what a layer returns besides x.
    """

    outer: set[str]
    key: bool
    outputs: set[int]
    reads_extras: bool


class Reads(NamedTuple):
    """What the arguments of layers and the output of a module depend on.

    Attributes:
        order: The layers in the order of their calls.
        leaves: [L] the arrays of the arguments of every layer, tracers whose identity counts.
        num_x: The number of arrays that are x of the first layer, which come first.
        of_layers: [L] what each of these depends on.
        of_output: The inputs on which each array of the output depends.
        draws_twice: Whether the output depends on numbers that were drawn for layers too.
    """

    order: list[int]
    leaves: list[list[Any]]
    num_x: int
    of_layers: list[list[Read]]
    of_output: list[Read]
    draws_twice: bool


def array_arguments(at: LayerArguments) -> list[Any]:
    """Returns the arrays of the arguments of a layer: those of x, and others but keys."""
    return [*map(jnp.asarray, jax.tree.leaves(at.x)), *(at.leaves[i] for i in at.array_ids)]


def find_reads(call: Callable[..., Any], outer: Any, row: Any, key: Any, results: Any) -> Reads:
    """Traces the call of a module once.

    It is `(outer, row, key, results, calls) -> output` and appends the index and the arguments of
    every layer to `calls`; `results` are [L] pairs of the shapes of x and of what a layer returns
    besides.
    """
    calls: list[tuple[int, LayerArguments]] = []
    leaves: list[list[Any]] = []

    def run(outer: Any, row: Any, key: Any, results: Any) -> Any:
        output = jax.tree.leaves(call(outer, row, key, results, calls))
        leaves.extend(array_arguments(at) for _, at in calls)
        return leaves, [leaf for leaf in output if isinstance(leaf, jax.Array)]

    arguments = outer, row, key, results
    closed = jax.make_jaxpr(run)(*arguments)
    reads = [_read(*used) for used in used_inputs(closed, arguments)]
    ends = [0, *accumulate(map(len, leaves))]
    of_layers = [reads[a:b] for a, b in pairwise(ends)]
    keys = len(jax.tree.leaves((outer, row))), len(jax.tree.leaves(key))
    twice = _draws_twice(closed, keys, ends[-1])
    num_x = len(jax.tree.leaves(calls[0][1].x)) if calls else 0
    order = [index for index, _ in calls]
    return Reads(
        order=order,
        leaves=leaves,
        num_x=num_x,
        of_layers=of_layers,
        of_output=reads[ends[-1] :],
        draws_twice=twice,
    )


def _read(outer: dict[str, Any], row: PyTree, key: Any, results: list[Any]) -> Read:
    del row
    names = {name for name, used in outer.items() if any(jax.tree.leaves(used))}
    layers = {i for i, (y, _) in enumerate(results) if any(jax.tree.leaves(y))}
    extras = any(any(jax.tree.leaves(of_layer)) for _, of_layer in results)
    return Read(names, any(jax.tree.leaves(key)), layers, extras)


def _draws_twice(closed: ClosedJaxpr, keys: tuple[int, int], num_arguments: int) -> bool:
    """Returns whether arguments of layers and the output depend on the same drawn numbers.

    They are the first outputs of the program and the others; `keys` is where leaves of the key
    begin among its inputs, and their number.
    """
    jaxpr = closed.jaxpr
    drawn = set(jaxpr.invars[keys[0] : sum(keys)])
    for eqn in jaxpr.eqns:
        if any(not isinstance(v, Literal) and v in drawn for v in eqn.invars):
            drawn.update(eqn.outvars)
    parts = jaxpr.outvars[:num_arguments], jaxpr.outvars[num_arguments:]
    needed = [_needed(jaxpr, outputs) for outputs in parts]
    # Parts of a key are integers: two functions may split it and draw apart.
    return any(
        v in drawn and not isinstance(v, Literal) and _is_drawn_number(v.aval)
        for v in needed[0] & needed[1]
    )


def _is_drawn_number(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return False
    return bool(jnp.issubdtype(dtype, jnp.inexact) or dtype == jnp.bool_)


def _needed(jaxpr: Any, outputs: Sequence[Any]) -> set[Any]:
    """Returns the variables that some outputs are computed from."""
    needed = {v for v in outputs if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if any(v in needed for v in eqn.outvars):
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return needed
