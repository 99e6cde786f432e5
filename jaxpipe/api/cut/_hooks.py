"""The parts of a module whose layers are a chain: each reads what the one before has returned.

Arguments of layers besides x that follow from the batch alone, such as masks, are computed again by
every layer; those that parameters or dropout influence travel with x.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
from jax.extend.core import get_opaque_trace_state
from jaxtyping import PyTree

from ...ir.rows import is_same
from .._dependence import dependent_inputs
from .._pieces import shape_of
from ._layer_calls import (
    LayerArguments,
    LayerCall,
    NoChainError,
    arguments_of,
    check_chain,
    check_same_arguments,
    shapes_of,
    stand_in,
    x_and_extras,
    zeros_of,
)
from ._parts import Outer, Parts, or_none, packed, shape_of_key, unpacked
from ._reads import Reads, find_reads


class Stop(BaseException):
    """Ends the call of a module at a layer."""

    def __init__(self, result: Any):
        super().__init__()
        self.result = result


class _Carried(NamedTuple):
    """Arguments of layers that travel with x.

    Attributes:
        sources: The kind, and the index of the argument, that each array is taken from.
        slots: For every kind the arrays that its arguments are, by the index of the argument.
    """

    sources: tuple[tuple[int, int], ...]
    slots: tuple[dict[int, int], ...]


@dataclass(frozen=True, eq=False)
class HookParts(Parts):
    """The parts of a module whose layers are a list: each is called once, by the module's call.

    Attributes:
        is_alone: Whether every layer is a kind of its own, to be compared with others.
    """

    is_alone: bool = False

    def with_kinds(self, batch: PyTree) -> tuple["HookParts", list[str]]:
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
                arrays = {i: others[slot] for i, slot in slots.items()}
                args, kwargs = arguments_of(call).replace(y, arrays, key)
                raise Stop((call.run(*args, **kwargs), call.sown()))

            result, sown = stopped(self.cut.run, outer, {index: w}, batch, key, hook)
            x, extras = self.x_and_extras(result, y)
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

    def x_and_extras(self, result: Any, x: PyTree) -> tuple[PyTree, tuple[PyTree, ...]]:
        """Returns x out of the result of a layer, and (the rest of the result,) or ()."""
        return x_and_extras(result, x)

    def extras_of_layers(self, row: PyTree) -> list[tuple[PyTree, ...]]:
        """Returns (shapes of what a layer returns besides x,) of one row, or (), for each layer."""
        return self.of_form("results", row, self._find_results)[1]

    def outputs_of_layers(self, row: PyTree) -> list[PyTree]:
        """Returns the shapes of the x of one row that each layer returns."""
        return self.of_form("results", row, self._find_results)[0]

    def _find_results(self, row: PyTree) -> tuple[list[PyTree], list[tuple[PyTree, ...]]]:
        """Returns the shapes of x that each layer returns, and of (what is besides it,) or ().

        Layers with equal settings, parameters and x are run once.
        """
        seen: list[tuple[Any, ...]] = []
        outputs: list[PyTree] = []
        forms: list[tuple[PyTree, ...]] = []

        def hook(call: LayerCall) -> Any:
            at, weights = arguments_of(call), self.cut.layers[call.index]
            x, form = at.x, at.form
            known = next(
                (s for s in seen if s[:2] == (weights, form) and is_same(s[2], call.static)), None
            )
            if known is None:
                result = self.x_and_extras(call.run(*call.args, **call.kwargs), x)
                known = weights, form, call.static, *shapes_of(result)
                seen.append(known)
            outputs.append(known[3])
            forms.append(known[4])
            if len(forms) == len(self.names):
                raise Stop(None)
            y, extras = stand_in(known[3], x), zeros_of(known[4])
            return (y, *extras) if extras else y

        def run(outer: Outer, layers: list[PyTree], batch: PyTree, key: Any) -> None:
            with suppress(Stop):
                self.cut.run(outer, dict(enumerate(layers)), batch, key, hook)

        key = shape_of_key(self.cut.takes_key)
        jax.eval_shape(run, self.cut.outer, self.cut.layers, row, key)
        return outputs, forms

    def returned(self, y: PyTree, extras: list[Any] | None, index: int, row: PyTree) -> Any:
        """Returns the result of a layer: x, or x with its extras, out of those of all layers."""
        forms = self.extras_of_layers(row)
        if index >= len(forms) or not forms[index]:
            return y
        if extras is None:
            return y, *zeros_of(forms[index])
        leaves, tree = jax.tree.flatten(forms[index][0])
        kind = self._kind(index)
        first = sum(len(jax.tree.leaves(forms[i])) for i in self._first[:kind])
        at = self.kinds[:index].count(kind) if self.kinds else index
        return y, tree.unflatten([extra[at] for extra in extras[first : first + len(leaves)]])

    def carried(self, batch: PyTree) -> _Carried:
        """Checks a module on a batch of new form, and finds the arguments that travel with x."""

        def find(batch: PyTree) -> _Carried:
            calls = self.recorded_calls(self.row(batch))
            check_chain(calls, self.names)
            self._check_chain_of_reads(self.reads(self.row(batch)))
            for call, at, _ in calls:
                first = self._first[self._kind(call.index)]
                check_same_arguments(calls[first][1], at, self.names[first], self.names[call.index])
            return self.influenced(self.row(batch), calls)

        carried = self.of_form("carried", batch, find)
        if not self.is_alone:
            self.check_kinds(jax.tree.map(shape_of, batch))
        return carried

    def reads(self, row: PyTree) -> Reads:
        """Finds what the arguments of layers and the output of the module depend on."""

        def call(outer: Outer, row: PyTree, key: Any, results: Any, calls: Any) -> Any:
            def hook(call: LayerCall) -> Any:
                calls.append((call.index, arguments_of(call)))
                y, extras = results[call.index]
                return (y, *extras) if extras else y

            return self.cut.run(outer, {}, row, key, hook)

        def find(row: PyTree) -> Reads:
            results = zip(self.outputs_of_layers(row), self.extras_of_layers(row), strict=True)
            key = shape_of_key(self.cut.takes_key)
            row_reads = find_reads(call, self.cut.outer, row, key, list(results))
            if row_reads.draws_twice:
                raise ValueError(
                    "The output of the module depends on numbers that it has drawn by a dropout "
                    "key for a layer, such as a dropped embedding. In a pipeline the two would "
                    "draw apart: drop in a layer."
                )
            return row_reads

        return self.of_form("reads", row, find)

    def _check_chain_of_reads(self, reads: Reads) -> None:
        """Raises a `NoChainError` if more is read than what the layer before has returned."""
        for index, of_layer in enumerate(reads.of_layers):
            if any(read.outputs - {index - 1} or read.reads_extras for read in of_layer):
                raise NoChainError(
                    f"An argument of `{self.names[index]}` depends on what layers before it "
                    "return, besides x of the last one. Give `batch=`, an example of a batch, by "
                    "which what later layers read is found."
                )
        last = len(self.names) - 1
        for i in sorted({i for read in reads.of_output for i in read.outputs} - {last}):
            raise NoChainError(
                f"The output of the module depends on what `{self.names[i]}` returned, which is "
                "not the last layer. Give `batch=`, an example of a batch, by which what is read "
                "behind the layers is found."
            )

    def check_kinds(self, batch: PyTree) -> None:
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
        outputs = self.outputs_of_layers(batch)  # not inside of the call that is recorded
        calls: list[tuple[LayerCall, LayerArguments, PyTree]] = []
        of_module: list[Any] = []

        def hook(call: LayerCall) -> Any:
            # What the hook is given must belong to the module's own trace to leave it.
            if get_opaque_trace_state() != of_module[0]:
                raise ValueError(
                    f"`{self.names[call.index]}` runs inside of a transformation of the module's "
                    "call, such as `jax.vmap` or `nn.remat`, and a pipeline cuts the call "
                    "there. Call layers outside of it: `jaxpipe.pipeline` has `layer_remat=`, and "
                    "`jaxpipe.equinox.model` takes a `call` of one row."
                )
            at = arguments_of(call)
            # A wrong order of calls, of which there may be more than layers, is refused later.
            known = outputs[len(calls)] if len(calls) < len(outputs) else shapes_of(at.x)
            y = stand_in(known, at.x)
            calls.append((call, at, jax.lax.optimization_barrier(y)))
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
                raise NoChainError(
                    f"The argument {first[kind].names[i]} of `{self.names[self._first[kind]]}` "
                    "depends on what layers before it return. Give `batch=`, an example of a "
                    "batch, by which what later layers read is found."
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
                raise Stop(arguments)
            y = at.x if xs is None else xs[call.index]
            return self.returned(y, None, call.index, batch)

        return stopped(self.cut.run, outer, {}, batch, key, hook)

    def kinds_of_layers(self, batch: PyTree) -> tuple[int, ...]:
        """Returns the kind of every layer: layers of one kind have equal programs."""
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
                raise NoChainError(
                    f"`{self.names[index]}` returns {forms[0]} and is given {forms[1]}. Give "
                    "`batch=`, an example of a batch, with which layers may change x; or return "
                    "what the layer is given."
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


def stopped(run: Callable, *arguments: Any) -> Any:
    """Runs a call that ends at a layer."""
    try:
        run(*arguments)
    except Stop as stop:
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
