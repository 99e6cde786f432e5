"""Cuts the call of a library's module at its layers: embedding, one layer and loss as functions.

The module's call runs with a hook in place of every layer. For the embedding the hook ends the call
at the first layer, and takes the arguments of this layer. For a layer it ends it there too, after
the layer has run on other arguments. For the loss every layer returns what left the last one. What
a part does not need of the call is removed from its program.

Arguments of layers besides x that follow from the batch alone, such as masks, are computed again by
every layer; those that parameters or dropout influence travel with x. What layers return besides x
is in `_parts`, and layers that run in a `lax.scan` are in `_scan`.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._dependence import dependent_inputs
from .._model import Model, ModelFunction
from ._layer_calls import LayerArguments, LayerCall, arguments_of, check_chain
from ._parts import CutModule, Outer, Parts, or_none, packed, shape_of, shape_of_key, unpacked
from ._scan import ScanParts


class _Stop(BaseException):
    """Ends the call of a module at a layer."""

    def __init__(self, result: Any):
        super().__init__()
        self.result = result


def cut_model(cut: CutModule, loss: Callable, batch: PyTree | None, stacked: bool = False) -> Model:
    """Makes the model of a module.

    Args:
        loss: `(output of the module, batch) -> loss` of `Model.loss`.
        batch: An example of a batch, arrays or shapes. With it parameters outside of layers are
            divided into those of the embedding and those of the loss, and everything is checked
            at once; without it both parts have all of them, and the first batch is checked.

    Raises:
        ValueError: If layers do not form a chain of equal programs.
    """
    parts = (ScanParts if stacked else _HookParts)(cut, loss)
    embedded, headed = set(cut.outer), set(cut.outer)
    keyed = [cut.takes_key] * 3
    if batch is not None:
        embedded, headed, keyed = parts.uses(jax.tree.map(shape_of, batch))
    tied = bool(embedded & headed)
    in_head = set() if tied and batch is None else headed - embedded

    def embed(w: Any, batch: PyTree, key: Any) -> Any:
        return parts.embed(w, batch, key)

    def layer(w: Any, x: PyTree, batch: PyTree, key: Any) -> Any:
        return parts.layer(w, x, batch, key)

    def loss_of(w: Any, x: PyTree, batch: PyTree, key: Any) -> Any:
        return parts.loss_of(w["embed"] | w["head"] if tied else w, x, batch, key)

    def to_groups(params: PyTree) -> dict[str, PyTree]:
        outer, layers = cut.split(params)
        head = {name: leaf for name, leaf in outer.items() if name in in_head}
        rest = {name: leaf for name, leaf in outer.items() if name not in in_head}
        return {"embed": rest, "layers": layers, "head": head}

    def from_groups(groups: dict[str, PyTree]) -> PyTree:
        return cut.join(groups["embed"] | groups["head"], groups["layers"])

    first, middle, last = map(ModelFunction, (embed, layer, loss_of), keyed)
    return Model(first, middle, last, tied, to_groups, from_groups)


class _HookParts(Parts):
    """The parts of a module whose layers are a list: each is called once, by the module's call."""

    @property
    def first_layer(self) -> PyTree:
        return self.cut.layers[0]

    def embed(self, outer: Outer, batch: PyTree, key: Any) -> Any:
        carried = self.carried_ids(batch)

        def one(outer: Outer, batch: PyTree, key: Any) -> Any:
            at = self.at_first_layer(outer, batch, key)
            return packed(at.x, [at.leaves[i] for i in carried])

        return self.read(self.over_rows(one, 1), outer, batch, or_none(key))[0]

    def layer_and_extras(
        self, w: PyTree, x: PyTree, batch: PyTree, key: Any, index: int = 0
    ) -> tuple[PyTree, list[Any], dict[str, Any]]:
        carried = self.carried_ids(batch)

        def one(outer: Outer, w: PyTree, batch: PyTree, x: PyTree, key: Any) -> Any:
            y, others = unpacked(x, carried)

            def hook(call: LayerCall) -> Any:
                if call.index < index:
                    return self.returned(y, None, 0, batch)
                given = dict(zip(carried, others, strict=True))
                args, kwargs = arguments_of(call).replace(y, given, key)
                raise _Stop((call.run(*args, **kwargs), call.sown()))

            result, sown = _stopped(self.cut.run, outer, {index: w}, batch, key, hook)
            x, extras = _taken_apart(result, y)
            return packed(x, others), jax.tree.leaves(extras), sown

        return self.read(self.over_rows(one, 2), {}, w, batch, x, or_none(key))[0]

    def output(self, outer: Outer, batch: PyTree, x: PyTree, extras: list[Any], key: Any) -> PyTree:
        carried = self.carried_ids(batch)

        def one(outer: Outer, batch: PyTree, x: PyTree, extras: list[Any], key: Any) -> Any:
            y, _ = unpacked(x, carried)

            def hook(call: LayerCall) -> Any:
                return self.returned(y, extras, call.index, batch)

            return self.cut.run(outer, {}, batch, key, hook)

        return self.over_rows(one, 1)(outer, batch, x, extras, or_none(key))

    def extras(self, batch: PyTree) -> list[jax.ShapeDtypeStruct]:
        shapes = jax.tree.leaves(self.extras_of_layer(self.row(batch)))
        return self.with_layers_and_rows(shapes, batch)

    def extras_of_layer(self, row: PyTree) -> tuple[PyTree, ...]:
        """Returns (shapes of what a layer returns besides x,), of one row; () if it returns x."""

        def find(row: PyTree) -> tuple[PyTree, ...]:
            def hook(call: LayerCall) -> Any:
                raise _Stop((call.run(*call.args, **call.kwargs), arguments_of(call).x))

            def run(outer: Outer, w: PyTree, batch: PyTree, key: Any) -> tuple[PyTree, ...]:
                layers = dict.fromkeys(range(len(self.cut.names)), w)
                return _taken_apart(*_stopped(self.cut.run, outer, layers, batch, key, hook))[1]

            key = shape_of_key(self.cut.takes_key)
            return jax.eval_shape(run, self.cut.outer, self.first_layer, row, key)

        return self.of_form("extras", row, find)

    def returned(self, y: PyTree, extras: list[Any] | None, index: int, row: PyTree) -> Any:
        """Returns what a layer returns: x, or x with extras, which are given for all layers."""
        shapes = self.extras_of_layer(row)
        if not shapes:
            return y
        leaves, tree = jax.tree.flatten(shapes[0])
        if extras is None:
            return y, tree.unflatten([jnp.zeros(s.shape, s.dtype) for s in leaves])
        return y, tree.unflatten([extra[index] for extra in extras])

    def carried_ids(self, batch: PyTree) -> tuple[int, ...]:
        """Checks a module on a batch of new form, and finds the arguments that travel with x."""

        def find(batch: PyTree) -> tuple[tuple[int, ...], list[list[int]]]:
            self.extras_of_layer(self.row(batch))  # not inside of the call that is recorded
            calls = self.recorded_calls(self.row(batch))
            first = calls[0][0].static
            others = [call.index for call, _, _ in calls if not _is_equal(call.static, first)]
            return self.influenced_ids(self.row(batch), calls[0][1].array_ids), [others]

        ids, unchecked = self.of_form("carried", batch, find)
        if unchecked:
            self.check_layers(jax.tree.map(shape_of, batch), unchecked.pop())
        return ids

    def recorded_calls(self, batch: PyTree) -> list[tuple[LayerCall, LayerArguments, PyTree]]:
        """Returns the calls of all layers, which form a chain."""
        calls: list[tuple[LayerCall, LayerArguments, PyTree]] = []

        def hook(call: LayerCall) -> Any:
            at = arguments_of(call)
            calls.append((call, at, jax.lax.optimization_barrier(at.x)))
            return self.returned(calls[-1][2], None, 0, batch)

        def run(outer: Outer, batch: PyTree, key: Any) -> None:
            self.cut.run(outer, {}, batch, key, hook)
            check_chain(calls, self.cut.names)

        jax.eval_shape(run, self.cut.outer, batch, shape_of_key(self.cut.takes_key))
        return calls

    def influenced_ids(self, batch: PyTree, ids: list[int]) -> tuple[int, ...]:
        """Returns those arguments of layers that parameters or a dropout key influence."""

        def others(outer: Outer, batch: PyTree, key: Any) -> Any:
            at = self.at_first_layer(outer, batch, key)
            return [at.leaves[i] for i in ids]

        key = shape_of_key(self.cut.takes_key)
        found, _ = dependent_inputs(others, self.cut.outer, batch, key)
        influenced = [any(jax.tree.leaves((used[0], used[2]))) for used in found]
        return tuple(i for i, is_influenced in zip(ids, influenced, strict=True) if is_influenced)

    def at_first_layer(self, outer: Outer, batch: PyTree, key: Any) -> LayerArguments:
        """Returns the arguments of the first layer."""

        def hook(call: LayerCall) -> Any:
            raise _Stop(arguments_of(call))

        return _stopped(self.cut.run, outer, {}, batch, key, hook)

    def check_layers(self, batch: PyTree, others: list[int]) -> None:
        """Checks that layers return what they take, and that `others` compute what layer 0 does."""
        cut, key = self.cut, shape_of_key(self.cut.takes_key)
        x = jax.eval_shape(lambda *given: self.embed(*given), cut.outer, batch, key)
        carried = self.carried_ids(batch)
        programs = []
        for index in [0, *others]:

            def run(w: PyTree, x: PyTree, batch: PyTree, key: Any, index: int = index) -> Any:
                return self.layer_and_extras(w, x, batch, key, index)

            traced = jax.make_jaxpr(run, return_shape=True)
            program, (y, *_) = traced(cut.layers[index], x, batch, key)
            forms = [jax.tree.map(_form, unpacked(tree, carried)[0]) for tree in (y, x)]
            if forms[0] != forms[1]:
                raise ValueError(
                    f"`{cut.names[index]}` returns {forms[0]} and is given {forms[1]}. A layer "
                    "must return what it takes."
                )
            programs.append((re.sub(r"0x[0-9a-f]+", "", str(program.jaxpr)), program.consts))
            if not _is_equal(programs[-1], programs[0]):
                raise ValueError(
                    f"`{cut.names[index]}` computes something else than `{cut.names[0]}`: they "
                    "differ in more than parameters. Layers of one pipeline must be alike."
                )


def _stopped(run: Callable, *arguments: Any) -> Any:
    """Runs a call that ends at a layer."""
    try:
        run(*arguments)
    except _Stop as stop:
        return stop.result
    raise ValueError("The call of the module has run none of its layers.")


def _taken_apart(result: Any, x: PyTree) -> tuple[PyTree, tuple[PyTree, ...]]:
    """Returns the x that a layer returned, and (what it returned besides x,) or ()."""
    tree = jax.tree.structure(x)
    is_pair = isinstance(result, tuple) and len(result) == 2
    if jax.tree.structure(result) != tree and is_pair and jax.tree.structure(result[0]) == tree:
        return result[0], result[1:]
    return result, ()


def _form(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _is_equal(a: Any, b: Any) -> bool:
    """Returns whether objects are equal; arrays in lists and tuples by their elements."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_is_equal(x, y) for x, y in zip(a, b, strict=True))
    try:
        return a is b or bool(np.all(np.asarray(a == b)))
    except Exception:  # objects that cannot be compared
        return False
