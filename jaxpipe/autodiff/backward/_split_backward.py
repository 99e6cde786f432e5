"""Splits the backward of a stage into the gradients of activations and the gradients of weights.

The stage before waits for the first half only. The second half may run at any later time, and fills
bubbles: Qi et al., 2023, arXiv 2401.10241. The paper calls the halves B and W; here they are I and
W, and B is the whole backward.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import PyTree

from ...ir.graph import Graph, in_device_memory, pvary_like, select, to_graph
from ...ir.transforms import Entry, InputKind, accumulate, call_with_entries, partition
from ._pullback import floating, pullback


@dataclass(frozen=True)
class SplitBackward:
    """A function and its derivative, whole and in halves. Gradients are accumulated in place.

    `gradient` has the structure of `floating(weights)` and any floating dtype, which is the dtype
    of the sums. A cotangent has the structure of `floating` of its primal value. Weights, residuals
    and gradients may be arrays or entries of buffers. Of residuals that are computed, `into` has
    the entry to which each is written, or None; it is () if none is. In place of a residual that
    is written, and of a gradient in an entry, its buffer is returned. A loop over layers reads and
    writes such entries layer by layer.

    Attributes:
        forward: `(weights, x, batch_inputs, rng, into) -> (out, residuals)`, where residuals is a
            list of arrays.
        backward: `(weights, batch_inputs, rng, residuals, cotangent, gradient, finish) ->
            (gradient, dx, dbatch_inputs)`. `finish` is that of `ir.transforms.accumulate`, or None.
        input: `(weights, batch_inputs, rng, residuals, cotangent, into) -> (dx, dbatch_inputs,
            wgrad_residuals)`, the half without the gradients of weights. `wgrad_residuals` is a
            list of arrays for the other half.
        weight: `(weights, batch_inputs, rng, residuals for it, wgrad_residuals, gradient, finish)
            -> gradient`.
        for_weight: [num_residuals] whether `weight` reads each residual. All others can be freed
            after `input`.
        on_host: [num_residuals] whether rematerialization offloads each residual. The functions
            return and take it on the device: its caller moves it to the host and back.
    """

    forward: Callable[..., tuple[PyTree, list[jax.Array]]]
    backward: Callable[..., tuple[PyTree, PyTree, PyTree]]
    input: Callable[..., tuple[PyTree, PyTree, list[jax.Array]]]
    weight: Callable[..., PyTree]
    for_weight: tuple[bool, ...]
    on_host: tuple[bool, ...]


def split_backward(
    f: Callable, weights: PyTree, x: PyTree, batch_inputs: PyTree, rng: PyTree
) -> SplitBackward:
    """Traces `f(weights, x, batch_inputs, rng) -> out` once, and splits it and its backward.

    `f` is pure and closes over no array that is differentiated. Of the other arguments, which are
    examples, only shapes, dtypes and varying manual axes are read.
    """
    pulled = pullback(f, weights, x, batch_inputs, rng)
    closed, shapes = jax.make_jaxpr(pulled.forward, return_shape=True)(
        weights, x, batch_inputs, rng
    )
    computed, out_tree = in_device_memory(to_graph(closed)), jax.tree.structure(shapes[0])
    out, residuals = jax.tree.unflatten(jax.tree.structure(shapes), closed.out_avals)
    examples = weights, batch_inputs, rng, residuals, floating(out)
    closed, shapes = jax.make_jaxpr(pulled.backward, return_shape=True)(*examples)
    graph = in_device_memory(to_graph(closed))

    num_weights, num_residuals = len(jax.tree.leaves(shapes[0])), len(residuals)
    is_weight = [i < num_weights for i in range(len(graph.outputs))]
    sizes = [len(jax.tree.leaves(tree)) for tree in examples]
    kinds: list[InputKind] = [kind for kind, n in zip(_KINDS, sizes, strict=True) for _ in range(n)]
    halves = partition(graph, [not w for w in is_weight], kinds)
    gradient_tree, inputs_tree = jax.tree.structure(shapes[0]), jax.tree.structure(shapes[1:])
    start = sum(sizes[:3])
    always, for_weight = halves.reads[:start], halves.reads[start : start + num_residuals]

    def forward(weights, x, batch_inputs, rng, into=()):
        size = out_tree.num_leaves
        leaves = _run(computed, weights, x, batch_inputs, rng, into=enumerate(into, size))
        return jax.tree.unflatten(out_tree, leaves[:size]), leaves[size:]

    def backward(weights, batch_inputs, rng, residuals, cotangent, gradient, finish=None):
        inputs = weights, batch_inputs, rng, residuals, cotangent, gradient
        both = accumulate(graph, is_weight, finish)
        leaves = _run(both, *inputs, into=enumerate(_leaves(gradient)))
        new = jax.tree.unflatten(gradient_tree, leaves[:num_weights])
        return new, *jax.tree.unflatten(inputs_tree, leaves[num_weights:])

    def input(weights, batch_inputs, rng, residuals, cotangent, into=()):
        inputs, size = (weights, batch_inputs, rng, residuals, cotangent), inputs_tree.num_leaves
        leaves = _run(halves.first, *inputs, into=enumerate(into, size))
        return *jax.tree.unflatten(inputs_tree, leaves[:size]), leaves[size:]

    def weight(weights, batch_inputs, rng, residuals, wgrad_residuals, gradient, finish=None):
        inputs = select(_leaves((weights, batch_inputs, rng)), always)
        second = accumulate(halves.second, [True] * num_weights, finish)
        into = enumerate(_leaves(gradient))
        leaves = _run(second, inputs, residuals, wgrad_residuals, gradient, into=into)
        return jax.tree.unflatten(gradient_tree, leaves)

    on_host = tuple(aval.memory_space == jax.memory.Space.Host for aval in residuals)
    return SplitBackward(
        forward=forward,
        backward=backward,
        input=input,
        weight=weight,
        for_weight=for_weight,
        on_host=on_host,
    )


_KINDS: tuple[InputKind, ...] = ("recomputable", "recomputable", "recomputable", "saved", "dead")
"""Kinds of weights, batch inputs, rng, residuals and cotangent, as inputs of the second half."""


def _leaves(tree: PyTree) -> list[Any]:
    """Returns arrays and entries."""
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Entry))


def _run(program: Graph, *arguments: PyTree, into: Iterable[tuple[int, Any]]) -> list[jax.Array]:
    """Runs a program on leaves, and writes outputs `into` entries by their index.

    Leaves may vary over fewer manual axes than the examples did.
    """
    inputs = [
        x if isinstance(x, Entry) else pvary_like(value.aval, x)
        for value, x in zip(program.inputs, _leaves(arguments), strict=True)
    ]
    targets = {i: entry for i, entry in into if isinstance(entry, Entry)}
    return call_with_entries(program, inputs, targets)
