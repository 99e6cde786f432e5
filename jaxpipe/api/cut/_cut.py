"""Cuts the call of a library's module at its layers: embedding, one layer and loss as functions.

The module's call runs with a hook in place of every layer. For the embedding the hook ends the call
at the first layer, and takes the arguments of this layer. For a layer it ends it there too, after
the layer has run on other arguments. For the loss every layer returns what left the last one. What
a part does not need of the call is removed from its program.

Arguments of layers besides x that follow from the batch alone, such as masks, are computed again by
every layer; those that parameters or dropout influence travel with x. What layers return besides x
is in `_parts`, and layers that run in a `lax.scan` are in `_scan`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state
from jaxtyping import PyTree

from ...ir.rows import is_same
from .._dependence import dependent_inputs
from .._flops import layer_flops
from .._model import Model, ModelFunction
from .._pieces import shape_of
from ._layer_calls import (
    LayerArguments,
    LayerCall,
    arguments_of,
    check_chain,
    check_same_arguments,
    x_and_extras,
)
from ._parts import CutModule, Outer, Parts, or_none, packed, shape_of_key, unpacked
from ._repeated_calls import layers_by_calls
from ._scan import ScanParts


class _Stop(BaseException):
    """Ends the call of a module at a layer."""

    def __init__(self, result: Any):
        super().__init__()
        self.result = result


def cut_model(
    cut: CutModule,
    loss: Callable,
    batch: PyTree | None,
    output: Callable | None = None,
    plain: Callable | None = None,
    *,
    stacked: bool = False,
) -> Model:
    """Makes the model of a module.

    Args:
        loss: `(output of the module, batch) -> loss` of `Model.loss`.
        output: `(output of the module, batch) -> arrays [rows, ...]` that `apply` returns. None:
            the output of the module.
        plain: `(params, batch) -> loss` of the module's own call.
        batch: An example of a batch, arrays or shapes. With it parameters outside of layers are
            divided into those of the embedding and those of the loss, kinds of layers are found,
            and everything is checked at once; without it both parts have all of them, layers are
            of one kind, and the first batch is checked.
        stacked: Whether `cut` is that of a scan over a stack of layers.

    Raises:
        ValueError: If layers do not form a chain.
    """
    if cut.by_calls:
        cut = layers_by_calls(cut, batch)
    select = output or (lambda returned, batch: returned)
    parts: Parts = (ScanParts if stacked else _HookParts)(cut, loss, select, output is not None)
    embedded, headed = (set(cut.outer) - cut.shared for _ in range(2))
    keyed, names = [cut.takes_key] * 4, ["layer"]
    if batch is not None:
        batch = jax.tree.map(shape_of, batch)
        parts, names = parts.with_kinds(batch)
        embedded, headed, keyed = parts.uses(batch)
    both = sorted(cut.shared & (embedded | headed))
    if both:
        raise ValueError(
            f"Layers share the parameters {', '.join(both[:8])}, which the module reads before or "
            "behind them too. Pass what a layer needs of them as an argument, or as a part of x."
        )
    tied = bool(embedded & headed)
    in_head = set() if tied and batch is None else headed - embedded

    def embed(w: Any, batch: PyTree, key: Any) -> Any:
        return parts.embed(w, batch, key)

    def layer(kind: int) -> ModelFunction:
        def run(w: Any, x: PyTree, batch: PyTree, key: Any) -> Any:
            own, shared = (w["layer"], w["shared"]) if cut.shared else (w, {})
            return parts.layer(own, shared, x, batch, key, kind)

        return ModelFunction(run, keyed[1 + kind])

    def loss_of(w: Any, x: PyTree, batch: PyTree, key: Any) -> Any:
        return parts.loss_of(w["embed"] | w["head"] if tied else w, x, batch, key)

    def output_of(w: Any, x: PyTree, batch: PyTree, key: Any) -> PyTree:
        return parts.output_of(w["embed"] | w["head"] if tied else w, x, batch, key)

    def to_groups(params: PyTree) -> dict[str, PyTree]:
        outer, layers = cut.split(params)
        head = {name: leaf for name, leaf in outer.items() if name in in_head}
        shared = {name: leaf for name, leaf in outer.items() if name in cut.shared}
        rest = {n: leaf for n, leaf in outer.items() if n not in head and n not in shared}
        groups = {"embed": rest, "layers": layers, "head": head}
        return groups | {"shared": shared} if shared else groups

    def from_groups(groups: dict[str, PyTree]) -> PyTree:
        outer = groups["embed"] | groups["head"] | groups.get("shared", {})
        return cut.join(outer, groups["layers"])

    has_kinds = len(names) > 1
    model = Model(
        ModelFunction(embed, keyed[0]),
        {name: layer(kind) for kind, name in enumerate(names)} if has_kinds else layer(0),
        ModelFunction(loss_of, keyed[-2]),
        tied,
        to_groups,
        from_groups,
        shared=bool(cut.shared),
        output=ModelFunction(output_of, keyed[-1]),
        plain=plain,
        order=[names[kind] for kind in parts.kinds] if has_kinds else None,
    )
    if not has_kinds:
        return model
    params = jax.eval_shape(cut.join, cut.outer, cut.layers)
    return replace(model, layer_costs=layer_flops(model, params, batch))


def cut_stack_or_calls(
    stack: Callable[[], Model], calls: Callable[[], Model], batch: PyTree | None
) -> Model:
    """Returns the model of a module whose layers are in one submodule.

    It is a stack that the call scans over, or else one layer, which is called several times.

    Args:
        stack: Makes the model of a stack; it raises a `ValueError` if the module is none.
        calls: Makes the model of a module that is called several times.
        batch: An example of a batch, by which calls are found, or None.

    Returns:
        What `stack` returns, or else what `calls` returns.

    Raises:
        ValueError: If the module is neither.
    """
    try:
        return stack()
    except ValueError as error:
        if batch is None:
            raise ValueError(
                f"{error} If it is one module, which is called several times, give `batch=`, an "
                "example of a batch, by which its calls are found."
            ) from error
        try:
            return calls()
        except Exception as other:  # the user's module runs with a stand-in, and may raise anything
            raise ValueError(
                f"`layers` names one module. As a stack of layers: {error} As a layer that is "
                f"called several times: {other}"
            ) from other


class _Carried(NamedTuple):
    """Arguments of layers that travel with x.

    Attributes:
        sources: The kind, and the index of the argument, that each array is taken from.
        slots: For every kind the arrays that its arguments are, by the index of the argument.
    """

    sources: tuple[tuple[int, int], ...]
    slots: tuple[dict[int, int], ...]


@dataclass(frozen=True, eq=False)
class _HookParts(Parts):
    """The parts of a module whose layers are a list: each is called once, by the module's call.

    Attributes:
        is_alone: Whether every layer is a kind of its own, to be compared with others.
    """

    is_alone: bool = False

    def with_kinds(self, batch: PyTree) -> tuple["_HookParts", list[str]]:
        kinds = self.kinds_of_layers(batch)
        return replace(self, kinds=kinds), self.kind_names(kinds, batch)

    @property
    def _first(self) -> list[int]:
        """Returns the first layer of every kind."""
        return [self.kinds.index(kind) for kind in range(self.num_kinds)] if self.kinds else [0]

    def _kind(self, index: int) -> int:
        return self.kinds[index] if self.kinds else 0

    def layer_shapes(self, kind: int) -> PyTree:
        return self.cut.layers[self._first[kind]]

    def embed(self, outer: Outer, batch: PyTree, key: Any) -> Any:
        carried = self.carried(batch)

        def one(outer: Outer, batch: PyTree, key: Any) -> Any:
            at = self.arguments_by_kind(outer, batch, key)
            return packed(at[0].x, [at[kind].leaves[i] for kind, i in carried.sources])

        return self.read(self.over_rows(one, 1), outer, batch, or_none(key))[0]

    def layer_and_extras(
        self, w: PyTree, shared: Outer, x: PyTree, batch: PyTree, key: Any, kind: int = 0
    ) -> tuple[PyTree, list[Any], dict[str, Any]]:
        return self.run_layer(self._first[kind], w, shared, x, batch, key)

    def run_layer(
        self, index: int, w: PyTree, shared: Outer, x: PyTree, batch: PyTree, key: Any
    ) -> tuple[PyTree, list[Any], dict[str, Any]]:
        """Runs the layer of this index on other arguments than those of the module's call."""
        carried = self.carried(batch)

        def one(outer: Outer, w: PyTree, batch: PyTree, x: PyTree, key: Any) -> Any:
            y, others = unpacked(x, carried.sources)

            def hook(call: LayerCall) -> Any:
                if call.index < index:
                    return self.returned(y, None, call.index, batch)
                slots = carried.slots[self._kind(index)]
                given = {i: others[slot] for i, slot in slots.items()}
                args, kwargs = arguments_of(call).replace(y, given, key)
                raise _Stop((call.run(*args, **kwargs), call.sown()))

            result, sown = _stopped(self.cut.run, outer, {index: w}, batch, key, hook)
            x, extras = x_and_extras(result, y)
            return packed(x, others), jax.tree.leaves(extras), sown

        return self.read(self.over_rows(one, 2), shared, w, batch, x, or_none(key))[0]

    def module_output(
        self, outer: Outer, batch: PyTree, x: PyTree, extras: list[Any], key: Any
    ) -> PyTree:
        carried = self.carried(batch)

        def one(outer: Outer, batch: PyTree, x: PyTree, extras: list[Any], key: Any) -> Any:
            y, _ = unpacked(x, carried.sources)

            def hook(call: LayerCall) -> Any:
                return self.returned(y, extras, call.index, batch)

            return self.cut.run(outer, {}, batch, key, hook)

        return self.over_rows(one, 1)(outer, batch, x, extras, or_none(key))

    def extras(self, batch: PyTree) -> list[list[jax.ShapeDtypeStruct]]:
        forms, kinds = self.extras_of_layers(self.row(batch)), self.kinds or (0,) * len(self.names)
        return [
            self.with_layers_and_rows(jax.tree.leaves(forms[first]), kinds.count(kind), batch)
            for kind, first in enumerate(self._first)
        ]

    @property
    def names(self) -> list[str]:
        """Returns the names of layers."""
        return self.cut.names

    def extras_of_layers(self, row: PyTree) -> list[tuple[PyTree, ...]]:
        """Returns (shapes of what a layer returns besides x,) of one row, or (), for each layer.

        Layers with equal settings and parameters are run once.
        """

        def find(row: PyTree) -> list[tuple[PyTree, ...]]:
            seen: list[tuple[Any, Any, tuple[PyTree, ...]]] = []
            forms: list[tuple[PyTree, ...]] = []

            def hook(call: LayerCall) -> Any:
                x, shapes = arguments_of(call).x, self.cut.layers[call.index]
                form = next(
                    (f for s, w, f in seen if w == shapes and is_same(s, call.static)), None
                )
                if form is None:
                    result = call.run(*call.args, **call.kwargs)
                    form = x_and_extras(result, x)[1]
                    form = jax.tree.map(lambda leaf: shape_of(leaf), form)
                    seen.append((call.static, shapes, form))
                forms.append(form)
                if len(forms) == len(self.names):
                    raise _Stop(None)
                zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), form)
                return (x, *zeros) if form else x

            def run(outer: Outer, layers: list[PyTree], batch: PyTree, key: Any) -> None:
                with suppress(_Stop):
                    self.cut.run(outer, dict(enumerate(layers)), batch, key, hook)

            key = shape_of_key(self.cut.takes_key)
            jax.eval_shape(run, self.cut.outer, self.cut.layers, row, key)
            return forms

        return self.of_form("extras", row, find)

    def returned(self, y: PyTree, extras: list[Any] | None, index: int, row: PyTree) -> Any:
        """Returns what a layer returns: x, or x with its extras, out of those of all layers."""
        forms = self.extras_of_layers(row)
        if index >= len(forms) or not forms[index]:
            return y
        leaves, tree = jax.tree.flatten(forms[index][0])
        if extras is None:
            return y, tree.unflatten([jnp.zeros(s.shape, s.dtype) for s in leaves])
        kind = self._kind(index)
        first = sum(len(jax.tree.leaves(forms[i])) for i in self._first[:kind])
        at = self.kinds[:index].count(kind) if self.kinds else index
        return y, tree.unflatten([extra[at] for extra in extras[first : first + len(leaves)]])

    def carried(self, batch: PyTree) -> _Carried:
        """Checks a module on a batch of new form, and finds the arguments that travel with x."""

        def find(batch: PyTree) -> _Carried:
            calls = self.recorded_calls(self.row(batch))
            check_chain(calls, self.names)
            for call, at, _ in calls:
                first = self._first[self._kind(call.index)]
                check_same_arguments(calls[first][1], at, self.names[first], self.names[call.index])
            return self.influenced(self.row(batch), calls)

        carried = self.of_form("carried", batch, find)
        if not self.is_alone:
            self._check_kinds(jax.tree.map(shape_of, batch))
        return carried

    def _check_kinds(self, batch: PyTree) -> None:
        """Raises a `ValueError` if layers of one kind compute something else on this batch."""
        kinds = self.kinds_of_layers(batch)
        for index, kind in enumerate(kinds):
            first = self._first[self._kind(index)]
            if kind == kinds[first]:
                continue
            names = self.kind_names(kinds, batch)
            raise ValueError(
                f"`{self.names[index]}` computes something else than `{self.names[first]}`: they "
                f"are layers of the kinds {names[kind]!r} and {names[kinds[first]]!r}. Give "
                "`batch=`, an example of a batch of the same form, by which the kinds of layers "
                "are found."
            )

    def kind_names(self, kinds: Sequence[int], batch: PyTree) -> list[str]:
        """Returns a name for every kind."""
        calls = self.recorded_calls(self.row(batch))
        return _kind_names(kinds, [call.attributes() for call, _, _ in calls])

    def recorded_calls(self, batch: PyTree) -> list[tuple[LayerCall, LayerArguments, PyTree]]:
        """Returns the calls of all layers, their arguments, and the x that each has returned."""
        self.extras_of_layers(batch)  # not inside of the call that is recorded
        calls: list[tuple[LayerCall, LayerArguments, PyTree]] = []
        of_module: list[Any] = []

        def hook(call: LayerCall) -> Any:
            if get_opaque_trace_state() != of_module[0]:
                raise ValueError(
                    f"`{self.names[call.index]}` runs inside of a transformation of the module's "
                    "call, such as `jax.vmap`, and a pipeline cuts the call there. Call layers "
                    "outside of it; `jaxpipe.equinox.model` takes a `call` of one row by itself."
                )
            at = arguments_of(call)
            calls.append((call, at, jax.lax.optimization_barrier(at.x)))
            return self.returned(calls[-1][2], None, len(calls) - 1, batch)

        def run(outer: Outer, batch: PyTree, key: Any) -> None:
            of_module[:] = [get_opaque_trace_state()]
            self.cut.run(outer, {}, batch, key, hook)

        jax.eval_shape(run, self.cut.outer, batch, shape_of_key(self.cut.takes_key))
        return calls

    def influenced(
        self, batch: PyTree, calls: list[tuple[LayerCall, LayerArguments, PyTree]]
    ) -> _Carried:
        """Returns those arguments of layers that parameters or a dropout key influence."""
        first = [calls[i][1] for i in self._first]
        pairs = [(kind, i) for kind, at in enumerate(first) for i in at.array_ids]
        x = jax.tree.map(shape_of, calls[0][1].x)

        def others(outer: Outer, batch: PyTree, key: Any, xs: list[PyTree]) -> Any:
            at = self.arguments_by_kind(outer, batch, key, xs)
            return [at[kind].leaves[i] for kind, i in pairs]

        key, xs = shape_of_key(self.cut.takes_key), [x] * self._first[-1]
        sources, _ = dependent_inputs(others, self.cut.outer, batch, key, xs)
        for (kind, i), used in zip(pairs, sources, strict=True):
            if any(jax.tree.leaves(used[3])):
                raise ValueError(
                    f"The argument {first[kind].names[i]} of `{self.names[self._first[kind]]}` "
                    "depends on what layers before it return. In a pipeline x alone leaves a "
                    "layer: make what later layers read a part of x."
                )
        travelling: list[tuple[int, int]] = []
        slots: list[dict[int, int]] = [{} for _ in first]
        for (kind, i), used in zip(pairs, sources, strict=True):
            if not any(jax.tree.leaves((used[0], used[2]))):
                continue
            same = [first[k].leaves[j] is first[kind].leaves[i] for k, j in travelling]
            if True not in same:
                same.append(True)
                travelling.append((kind, i))
            slots[kind][i] = same.index(True)
        return _Carried(tuple(travelling), tuple(slots))

    def arguments_by_kind(
        self, outer: Outer, batch: PyTree, key: Any, xs: list[PyTree] | None = None
    ) -> list[LayerArguments]:
        """Returns the arguments of the first layer of every kind, if layers return x or `xs`."""
        first, arguments = self._first, []

        def hook(call: LayerCall) -> Any:
            at = arguments_of(call)
            if call.index in first:
                arguments.append(at)
            if call.index == first[-1]:
                raise _Stop(arguments)
            y = at.x if xs is None else xs[call.index]
            return self.returned(y, None, call.index, batch)

        return _stopped(self.cut.run, outer, {}, batch, key, hook)

    def kinds_of_layers(self, batch: PyTree) -> tuple[int, ...]:
        """Checks that layers return what they take; returns the kind of each: equal programs."""
        return self.of_form("kinds", batch, self._find_kinds)

    def _find_kinds(self, batch: PyTree) -> tuple[int, ...]:
        cut, key = self.cut, shape_of_key(self.cut.takes_key)
        calls = self.recorded_calls(self.row(batch))
        check_chain(calls, self.names)
        every = tuple(range(len(self.names)))
        alone = replace(self, kinds=every, is_alone=True, forms={})
        x = jax.eval_shape(lambda *given: alone.embed(*given), cut.outer, batch, key)
        sources = alone.carried(batch).sources
        programs: dict[int, Any] = {}

        def program(index: int) -> Any:
            if index in programs:
                return programs[index]

            def run(w: PyTree, shared: Outer, x: PyTree, batch: PyTree, key: Any) -> Any:
                return alone.run_layer(index, w, shared, x, batch, key)

            traced = jax.make_jaxpr(run, return_shape=True)
            closed, (y, *_) = traced(cut.layers[index], self.shared_shapes, x, batch, key)
            forms = [jax.tree.map(_form, unpacked(tree, sources)[0]) for tree in (y, x)]
            if forms[0] != forms[1]:
                raise ValueError(
                    f"`{self.names[index]}` returns {forms[0]} and is given {forms[1]}. A layer "
                    "must return what it takes."
                )
            programs[index] = closed
            return closed

        first, kinds = [], []
        for call, at, _ in calls:
            index = call.index
            alike = (
                kind
                for kind, other in enumerate(first)
                if cut.layers[other] == cut.layers[index]
                and _given_the_same(calls[other][1], at)
                and (
                    is_same(calls[other][0].static, call.static)
                    or is_same(program(other), program(index))
                )
            )
            kind = next(alike, len(first))
            if kind == len(first):
                program(index)  # which checks it
                first.append(index)
            kinds.append(kind)
        return tuple(kinds)


def _kind_names(kinds: Sequence[int], attributes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a name for every kind: its class, or the settings by which it differs from others."""
    num_kinds = 1 + max(kinds, default=0)
    by_kind = [
        [a for a, k in zip(attributes, kinds, strict=True) if k == n] for n in range(num_kinds)
    ]
    keys = [key for key in by_kind[0][0] if key != "class"]

    def values(key: str) -> list[str] | None:
        """Returns the value of a setting for each kind, unless layers of a kind differ in it."""
        texts = [{repr(layer.get(key)) for layer in layers} for layers in by_kind]
        return [text for (text,) in texts] if all(len(of_kind) == 1 for of_kind in texts) else None

    classes = values("class") or [""] * num_kinds
    telling = [(key, v) for key in keys if (v := values(key)) and len(set(v)) > 1]
    names = []
    for kind in range(num_kinds):
        name = classes[kind].strip("'")
        if classes.count(classes[kind]) > 1:
            same = [k for k in range(num_kinds) if classes[k] == classes[kind]]
            here = [(key, v) for key, v in telling if len({v[k] for k in same}) > 1]
            settings = ", ".join(f"{key}={v[kind]}" for key, v in here[:3])
            name = f"{name}({settings})" if settings else name
        names.append(name)
    return [f"{name} {n}" if names.count(name) > 1 else name for n, name in enumerate(names)]


def _stopped(run: Callable, *arguments: Any) -> Any:
    """Runs a call that ends at a layer."""
    try:
        run(*arguments)
    except _Stop as stop:
        return stop.result
    raise ValueError("The call of the module has run none of its layers.")


def _given_the_same(a: LayerArguments, b: LayerArguments) -> bool:
    """Returns whether two layers are given the same arguments besides x."""
    try:
        check_same_arguments(a, b, "", "")
    except ValueError:
        return False
    return True


def _form(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
