"""The parts of a module whose layers read what any layer before them has returned.

Such are the skips of a U-Net, layers that attend to the output of a vision tower, and blocks that
read all blocks before them. x is what earlier layers have returned and later ones read, with the
arguments that parameters outside of layers or dropout determine. What the module computes between
layers is computed by the layer that reads it; parameters that it reads there are shared by layers.
L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jaxtyping import PyTree

from ...ir.rows import is_same
from .._pieces import shape_of
from ._hooks import HookParts, Stop, stopped
from ._layer_calls import (
    LayerArguments,
    LayerCall,
    arguments_of,
    check_order,
    zeros_of,
)
from ._parts import Outer, or_none, shape_of_key
from ._reads import Read, array_arguments


@dataclass(frozen=True)
class _Live:
    """The outputs and arrays that x consists of, in front of every layer and behind the last one.

    Attributes:
        outputs: [L + 1] the layers whose outputs are read there or later.
        carried: [L + 1] those of the carried arrays that are.
        sources: The layer, and the index of the leaf of its arguments, of every carried array.
        slots: [L] the carried arrays that arguments of a layer are, by the index of the leaf.
        shared: The parameters that are read between layers.
        reads_extras: Whether a layer reads what another has returned besides x.
    """

    outputs: tuple[tuple[int, ...], ...]
    carried: tuple[tuple[int, ...], ...]
    sources: tuple[tuple[int, int], ...]
    slots: tuple[dict[int, int], ...]
    shared: frozenset[str]
    reads_extras: bool

    def taken_apart(self, place: int, x: list[Any]) -> tuple[dict[int, Any], dict[int, Any]]:
        """Returns outputs by layer, and carried arrays by number."""
        outputs, carried = self.outputs[place], self.carried[place]
        count = len(outputs)
        return (
            dict(zip(outputs, x[:count], strict=True)),
            dict(zip(carried, x[count:], strict=True)),
        )


@dataclass(frozen=True, eq=False)
class BranchParts(HookParts):
    """The parts of a module whose layers are a graph: each is called once, in order.

    Attributes:
        has_whole_results: Whether all that a layer returns is x, because later layers read it.
    """

    has_whole_results: bool = False

    def with_kinds(self, batch: PyTree) -> tuple["BranchParts", list[str]]:
        parts = self
        if self._live(batch).reads_extras:
            parts = replace(self, has_whole_results=True, forms={})
        cut = replace(self.cut, shared=self.cut.shared | parts._live(batch).shared)
        parts = replace(parts, cut=cut)
        kinds = parts.kinds_of_layers(batch)
        return replace(parts, kinds=kinds), parts.kind_names(kinds, batch)

    def x_and_extras(self, result: Any, x: PyTree) -> tuple[PyTree, tuple[PyTree, ...]]:
        return (result, ()) if self.has_whole_results else super().x_and_extras(result, x)

    def x_of_kind(self, kind: int, batch: PyTree, key: Any) -> PyTree:
        return self._entering(batch, key)[self._first[kind]]

    def x_of_loss(self, batch: PyTree, key: Any) -> PyTree:
        return self._entering(batch, key)[-1]

    def embed(self, outer: Outer, batch: PyTree, key: Any) -> Any:
        live = self._live(batch)
        last = max(layer for layer, _ in live.sources)

        def one(outer: Outer, batch: PyTree, key: Any) -> Any:
            live_arrays: dict[tuple[int, int], Any] = {}

            def hook(call: LayerCall) -> Any:
                leaves = array_arguments(arguments_of(call))
                of_layer = [source for source in live.sources if source[0] == call.index]
                live_arrays.update({source: leaves[source[1]] for source in of_layer})
                if call.index == last:
                    raise Stop(live_arrays)
                return self._result_of(call.index, {}, batch)

            arrays = stopped(self.cut.run, outer, {}, batch, key, hook)
            return [arrays[source] for source in live.sources]

        return self.read(self.over_rows(one, 1), outer, batch, or_none(key))[0]

    def run_layer(
        self, index: int, w: PyTree, shared: Outer, x: PyTree, batch: PyTree, key: Any
    ) -> tuple[PyTree, list[Any], dict[str, Any]]:
        live = self._live(batch)

        def one(outer: Outer, w: PyTree, batch: PyTree, x: PyTree, key: Any) -> Any:
            outputs, carried = live.taken_apart(index, x)

            def hook(call: LayerCall) -> Any:
                if call.index < index:
                    return self._result_of(call.index, outputs, batch)
                at, leaves = arguments_of(call), {}
                for leaf, slot in live.slots[index].items():
                    leaves[leaf] = carried[slot]
                args, kwargs = _replaced(at, leaves, key)
                raise Stop((*self.x_and_extras(call.run(*args, **kwargs), at.x), call.sown()))

            y, extras, sown = stopped(self.cut.run, outer, {index: w}, batch, key, hook)
            outputs[index] = y
            behind = [outputs[i] for i in live.outputs[index + 1]]
            behind += [carried[slot] for slot in live.carried[index + 1]]
            return behind, jax.tree.leaves(extras), sown

        return self.read(self.over_rows(one, 2), shared, w, batch, x, or_none(key))[0]

    def module_output(
        self, outer: Outer, batch: PyTree, x: PyTree, extras: list[Any], key: Any
    ) -> PyTree:
        live = self._live(batch)

        def one(outer: Outer, batch: PyTree, x: PyTree, extras: list[Any], key: Any) -> Any:
            outputs, _ = live.taken_apart(-1, x)

            def hook(call: LayerCall) -> Any:
                return self._result_of(call.index, outputs, batch, extras)

            return self.cut.run(outer, {}, batch, key, hook)

        return self.over_rows(one, 1)(outer, batch, x, extras, or_none(key))

    def _result_of(
        self, index: int, outputs: dict[int, Any], row: PyTree, extras: list[Any] | None = None
    ) -> Any:
        """Returns the result of a layer, or zeros of its shapes if nothing reads it."""
        y = outputs.get(index)
        if y is None:
            y = zeros_of(self.outputs_of_layers(row)[index])
        return self.returned(y, extras, index, row)

    def _entering(self, batch: PyTree, key: Any) -> list[PyTree]:
        """Returns the shapes of x in front of every layer, and of the loss."""

        def find(batch: PyTree) -> list[PyTree]:
            x = jax.eval_shape(lambda *given: self.embed(*given), self.cut.outer, batch, key)
            x_shapes = [x]
            for index, w in enumerate(self.cut.layers):

                def run(w: Any, shared: Any, x: Any, batch: Any, key: Any, i: int = index) -> Any:
                    return self.run_layer(i, w, shared, x, batch, key)[0]

                x_shapes.append(
                    jax.eval_shape(run, w, self.shared_shapes, x_shapes[-1], batch, key)
                )
            return x_shapes

        return self.of_form("entering", jax.tree.map(shape_of, batch), find)

    def _find_kinds(self, batch: PyTree) -> tuple[int, ...]:
        cut, key = self.cut, shape_of_key(self.cut.takes_key)
        alone = replace(self, kinds=(), forms={})
        entering = alone._entering(batch, key)
        programs, first, kinds = [], [], []
        for index, (w, x) in enumerate(zip(cut.layers, entering, strict=False)):

            def run(w: Any, shared: Any, x: Any, batch: Any, key: Any, i: int = index) -> Any:
                return alone.run_layer(i, w, shared, x, batch, key)

            program, results = jax.make_jaxpr(run, return_shape=True)(
                w, self.shared_shapes, x, batch, key
            )
            programs.append((w, x, jax.tree.structure(results), program))
            alike = (kind for kind, i in enumerate(first) if _is_same(programs[i], programs[-1]))
            kind = next(alike, len(first))
            if kind == len(first):
                first.append(index)
            kinds.append(kind)
        return tuple(kinds)

    def _live(self, batch: PyTree) -> _Live:
        """Returns the arrays that are x between layers, for batches of a form."""
        live = self.of_form("live", self.row(batch), self._find_live)
        if self.kinds:
            self.check_kinds(jax.tree.map(shape_of, batch))
        return live

    def _find_live(self, row: PyTree) -> _Live:
        reads = self.reads(row)
        check_order(reads.order, self.names)
        last, shared = len(self.names), set[str]()
        needs: list[set[int]] = [set() for _ in range(last + 1)]
        sources: list[tuple[int, int]] = []
        slots: list[dict[int, int]] = [{} for _ in range(last)]
        of_arguments = [
            (i, n, read)
            for i, of_layer in enumerate(reads.of_layers)
            for n, read in enumerate(of_layer)
        ]
        for i, n, read in of_arguments:
            if read.outputs:
                self._check_no_key(read, i)
                needs[i] |= read.outputs
                shared |= read.outer
            # The embedding returns x of the first layer also if the batch determines it.
            elif read.outer or read.key or (i == 0 and n < reads.num_x):
                leaf = reads.leaves[i][n]
                same = [reads.leaves[j][m] is leaf for j, m in sources]
                if True not in same:
                    same.append(True)
                    sources.append((i, n))
                slots[i][n] = same.index(True)
        needs[last] = set[int]().union(*(read.outputs for read in reads.of_output))
        # If all layers read one early output, the last alone would drop it, and be a kind of its
        # own. So it passes on outputs that are older than those of the two layers before it.
        needs[last] |= {i for i in _read_from(last - 1, needs, range(last - 1)) if i < last - 2}
        read_at = [*(set(of_layer.values()) for of_layer in slots), set[int]()]
        return _Live(
            outputs=tuple(_read_from(i, needs, range(i)) for i in range(last + 1)),
            carried=tuple(_read_from(i, read_at, range(len(sources))) for i in range(last + 1)),
            sources=tuple(sources),
            slots=tuple(slots),
            shared=frozenset(shared),
            reads_extras=any(read.reads_extras for *_, read in of_arguments),
        )

    def _check_no_key(self, read: Read, index: int) -> None:
        if read.key:
            raise ValueError(
                f"An argument of `{self.names[index]}` depends on what layers return and on a "
                "dropout key, which the module reads between layers. Drop in a layer."
            )


def _read_from(first: int, reads: Sequence[set[int]], made: range) -> tuple[int, ...]:
    """Returns the items of `made` that are read in `first` or later, in order."""
    later = set[int]().union(*reads[first:])
    return tuple(sorted(later & set(made)))


def _replaced(
    at: LayerArguments, arrays: dict[int, Any], key: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with some of the arrays of `array_arguments` replaced."""
    leaves, tree = jax.tree.flatten(at.x)
    x = tree.unflatten([arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
    others = {
        i: arrays[len(leaves) + n] for n, i in enumerate(at.array_ids) if len(leaves) + n in arrays
    }
    return at.replace(x, others, key)


def _is_same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Returns whether two layers have equal parameters, x, results and programs."""
    return a[:3] == b[:3] and is_same(a[3], b[3])
