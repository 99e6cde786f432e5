"""Cuts the call of a library's module at its layers: embedding, one layer and loss as functions.

The module's call runs with a hook in place of every layer. For the embedding the hook ends the call
at the first layer, and takes the arguments of this layer. For a layer it ends it there too, after
the layer has run on other arguments. For the loss every layer returns what left the last one. What
a part does not need of the call is removed from its program.

Arguments of layers besides x that follow from the batch alone, such as masks, are computed again by
every layer; those that parameters or dropout influence travel with x.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._dependence import dependent_inputs, pruned
from .._model import Model
from ._layer_calls import LayerArguments, LayerCall, arguments_of, check_chain

Outer = Mapping[str, Any]
"""Parameters outside of layers, by name."""


@dataclass(frozen=True, eq=False)
class CutModule:
    """A module of a library, and how it is called.

    Attributes:
        run: `(outer, layers, batch, key, hook) -> output` calls the module with the parameters
            `outer`, and `layers` by index, and calls `hook(LayerCall)` in place of every layer.
        split: `params -> (outer, list of the parameters of every layer)`.
        join: The inverse of `split`.
        outer: Shapes and dtypes of parameters outside of layers, by name.
        layers: Those of every layer.
        names: The names of layers, for errors.
        takes_key: Whether the call may read a dropout key.
        by_row: Whether `run` takes one row of a batch.
    """

    run: Callable[..., Any]
    split: Callable[[PyTree], tuple[dict[str, Any], list[PyTree]]]
    join: Callable[[dict[str, Any], list[PyTree]], PyTree]
    outer: dict[str, Any]
    layers: list[PyTree]
    names: list[str]
    takes_key: bool
    by_row: bool = False


class _Stop(BaseException):
    """Ends the call of a module at a layer."""

    def __init__(self, result: Any):
        super().__init__()
        self.result = result


def cut_model(cut: CutModule, loss: Callable, batch: PyTree | None) -> Model:
    """Makes the model of a module whose layers are replaced by hooks.

    Args:
        cut: The module.
        loss: `(output of the module, batch) -> loss` of `Model.loss`.
        batch: An example of a batch, arrays or shapes. With it parameters outside of layers are
            divided into those of the embedding and those of the loss, and everything is checked
            at once; without it both parts have all of them, and the first batch is checked.

    Returns:
        The model.

    Raises:
        ValueError: If layers do not form a chain of equal programs.
    """
    parts = _Parts(cut, loss, {})
    embedded, headed = set(cut.outer), set(cut.outer)
    keyed = [cut.takes_key] * 3
    if batch is not None:
        embedded, headed, keyed = parts.uses(jax.tree.map(_shape_of, batch))
    tied = bool(embedded & headed)
    in_head = set() if tied and batch is None else headed - embedded

    def embed(w: Any, batch: PyTree, key: Any) -> Any:
        return parts.embed(w, batch, key)

    def layer(w: Any, x: PyTree, batch: PyTree, key: Any) -> Any:
        return parts.layer(w, x, batch, key)

    def loss_of(w: Any, x: PyTree, batch: PyTree, key: Any) -> Any:
        return parts.loss_of(w["embed"] | w["head"] if tied else w, x, batch, key)

    for function, takes_key in zip((embed, layer, loss_of), keyed, strict=True):
        function.takes_key = takes_key  # pyright: ignore[reportFunctionMemberAccess]

    def to_groups(params: PyTree) -> dict[str, PyTree]:
        outer, layers = cut.split(params)
        head = {name: leaf for name, leaf in outer.items() if name in in_head}
        rest = {name: leaf for name, leaf in outer.items() if name not in in_head}
        return {"embed": rest, "layers": layers, "head": head}

    def from_groups(groups: dict[str, PyTree]) -> PyTree:
        return cut.join(groups["embed"] | groups["head"], groups["layers"])

    return Model(embed, layer, loss_of, tied, to_groups, from_groups)


@dataclass(frozen=True, eq=False)
class _Parts:
    """The three functions of a cut module.

    Attributes:
        cut: The module.
        loss: The user's loss.
        carried: For batches of every form that were seen, the indices of arguments of layers that
            travel with x.
    """

    cut: CutModule
    loss: Callable
    carried: dict[Any, tuple[int, ...]]

    def embed(self, outer: Outer, batch: PyTree, key: Any) -> Any:
        """Returns what the first layer is given, of all rows."""
        carried = self.carried_ids(batch)

        def one(outer: Outer, batch: PyTree, key: Any) -> Any:
            at = self.at_first_layer(outer, batch, key)
            return _packed(at.x, [at.leaves[i] for i in carried])

        return self.read(self.over_rows(one, 1), outer, batch, _or_none(key))[0]

    def layer(self, w: PyTree, x: PyTree, batch: PyTree, key: Any, index: int = 0) -> Any:
        """Returns what leaves a layer, of all rows."""
        carried = self.carried_ids(batch)

        def one(outer: Outer, w: PyTree, batch: PyTree, x: PyTree, key: Any) -> Any:
            y, others = _unpacked(x, carried)

            def hook(call: LayerCall) -> Any:
                if call.index < index:
                    return y
                given = dict(zip(carried, others, strict=True))
                args, kwargs = arguments_of(call).replace(y, given, key)
                raise _Stop(call.run(*args, **kwargs))

            result = _stopped(self.cut.run, outer, {index: w}, batch, key, hook)
            return _packed(result, others)

        run = self.over_rows(one, 2)
        return self.read(run, {}, w, batch, x, _or_none(key))[0]

    def loss_of(self, outer: Outer, x: PyTree, batch: PyTree, key: Any) -> Any:
        """Returns the loss, from what left the last layer."""
        carried = self.carried_ids(batch)

        def one(outer: Outer, batch: PyTree, x: PyTree, key: Any) -> Any:
            y, _ = _unpacked(x, carried)
            return self.cut.run(outer, {}, batch, key, lambda call: y)

        def with_loss(outer: Outer, batch: PyTree, x: PyTree, key: Any) -> Any:
            return self.loss(self.over_rows(one, 1)(outer, batch, x, key), batch)

        return self.read(with_loss, outer, batch, x, _or_none(key))[0]

    def read(self, function: Callable, outer: Outer, *arguments: PyTree) -> tuple[Any, set[str]]:
        """Runs what a function needs for its result; returns also the outer parameters it reads."""
        given = self.cut.outer | dict(outer)
        part, used = pruned(function, given, *arguments)
        names = {name for name, tree in used[0].items() if any(jax.tree.leaves(tree))}
        missing = sorted(names - set(outer))
        if missing:
            raise ValueError(
                f"Layers, or the loss, read the parameters {', '.join(missing[:8])}, which are "
                "not theirs. Pass what layers share as an argument; give `batch=` of the same "
                "form as the batches of the training, or leave it out."
            )
        return part(given, *arguments), names

    def uses(self, batch: PyTree) -> tuple[set[str], set[str], list[bool]]:
        """Returns the parameters of embedding and loss, and which functions read a key."""
        cut, key = self.cut, _shape_of_key(self.cut.takes_key)
        found = []

        def call(function: Callable, *arguments: PyTree) -> Any:
            part, used = pruned(function, *arguments)
            names = {n for n, tree in used[0].items() if any(jax.tree.leaves(tree))}
            found.append((names, any(jax.tree.leaves(used[-1]))))
            return jax.eval_shape(part, *arguments)

        x = call(self.embed, cut.outer, batch, key)
        call(lambda w, *rest: self.layer(w["0"], *rest), {"0": cut.layers[0]}, x, batch, key)
        call(self.loss_of, cut.outer, x, batch, key)
        return found[0][0], found[2][0], [reads_key for _, reads_key in found]

    def carried_ids(self, batch: PyTree) -> tuple[int, ...]:
        """Checks a module on a batch of new form, and finds the arguments that travel with x."""
        leaves, tree = jax.tree.flatten(batch)
        form = tree, tuple((jnp.shape(leaf), str(jnp.result_type(leaf))) for leaf in leaves)
        if form not in self.carried:
            row = jax.tree.map(partial(_shape_of, skipped=int(self.cut.by_row)), batch)
            calls = self.recorded_calls(row)
            self.carried[form] = self.influenced_ids(row, calls[0][1].array_ids)
            first = calls[0][0].static
            others = [call.index for call, _, _ in calls if not _is_equal(call.static, first)]
            self.check_layers(jax.tree.map(_shape_of, batch), others)
        return self.carried[form]

    def recorded_calls(self, batch: PyTree) -> list[tuple[LayerCall, LayerArguments, PyTree]]:
        """Returns the calls of all layers, which form a chain."""
        calls: list[tuple[LayerCall, LayerArguments, PyTree]] = []

        def hook(call: LayerCall) -> Any:
            at = arguments_of(call)
            calls.append((call, at, jax.lax.optimization_barrier(at.x)))
            return calls[-1][2]

        def run(outer: Outer, batch: PyTree, key: Any) -> None:
            self.cut.run(outer, {}, batch, key, hook)
            check_chain(calls, self.cut.names)

        jax.eval_shape(run, self.cut.outer, batch, _shape_of_key(self.cut.takes_key))
        return calls

    def influenced_ids(self, batch: PyTree, ids: list[int]) -> tuple[int, ...]:
        """Returns those arguments of layers that parameters or a dropout key influence."""

        def others(outer: Outer, batch: PyTree, key: Any) -> Any:
            at = self.at_first_layer(outer, batch, key)
            return [at.leaves[i] for i in ids]

        key = _shape_of_key(self.cut.takes_key)
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
        cut, key = self.cut, _shape_of_key(self.cut.takes_key)
        x = jax.eval_shape(lambda *given: self.embed(*given), cut.outer, batch, key)
        programs = []
        for index in [0, *others]:

            def run(w: PyTree, x: PyTree, batch: PyTree, key: Any, index: int = index) -> Any:
                return self.layer(w, x, batch, key, index)

            program, y = jax.make_jaxpr(run, return_shape=True)(cut.layers[index], x, batch, key)
            carried = self.carried_ids(batch)
            forms = [jax.tree.map(_form, _unpacked(tree, carried)[0]) for tree in (y, x)]
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

    def over_rows(self, function: Callable, num_shared: int) -> Callable:
        """Returns a function of all rows, whose last argument is a key."""
        if not self.cut.by_row:
            return function

        def run(*arguments: PyTree) -> PyTree:
            *given, key = arguments
            rows = jnp.shape(jax.tree.leaves(given[num_shared])[0])[0]
            keys = None if key is None else jax.random.split(key, rows)
            axes = (None,) * num_shared + (0,) * (len(given) - num_shared)
            return jax.vmap(function, in_axes=(*axes, None if key is None else 0))(*given, keys)

        return run


def _stopped(run: Callable, *arguments: Any) -> Any:
    """Runs a call that ends at a layer."""
    try:
        run(*arguments)
    except _Stop as stop:
        return stop.result
    raise ValueError("The call of the module has run none of its layers.")


def _packed(x: PyTree, carried: list[Any]) -> PyTree:
    return {"x": x, "carried": carried} if carried else x


def _unpacked(x: PyTree, carried: tuple[int, ...]) -> tuple[PyTree, list[Any]]:
    return (x["x"], x["carried"]) if carried else (x, [])


def _or_none(key: Any) -> Any:
    return key if jax.tree.leaves(key) else None


def _shape_of(leaf: Any, skipped: int = 0) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf)[skipped:], jnp.result_type(leaf))


def _form(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _shape_of_key(takes_key: bool) -> Any:
    return jax.eval_shape(partial(jax.random.key, 0)) if takes_key else None


def _is_equal(a: Any, b: Any) -> bool:
    """Returns whether objects are equal; arrays in lists and tuples by their elements."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_is_equal(x, y) for x, y in zip(a, b, strict=True))
    try:
        return a is b or bool(np.all(np.asarray(a == b)))
    except Exception:  # objects that cannot be compared
        return False
