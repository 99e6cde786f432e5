"""Cuts the call of a module whose layers run in a `lax.scan` over a stack of their parameters.

The program of the call is cut at the scan: what it is given is the embedding, its body is a layer,
and what follows is the loss. What the body reads besides parameters and the carry is computed
again by every layer if it follows from the batch alone; it travels with x if parameters or dropout
influence it. Every random key that the body reads becomes the key of the layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jaxtyping import PyTree

from ..._compat import ClosedJaxpr, scan_sizes
from ...sharding import match_varying_axes, varying_axes
from .._dependence import dependent_inputs, pruned, rewritten
from .._pieces import shape_of
from ._parts import Outer, Parts, or_none, packed, shape_of_key, unpacked


@dataclass(frozen=True, eq=False)
class _ScannedCall:
    """The program of a module's call on a batch, or row, of one form.

    Attributes:
        closed: The program, `(outer, stack, batch, key) -> output`.
        at: The index of the scan over layers in its equations.
        stack_ids: For every x that the scan takes apart the index of the parameter in the stack, or
            None.
        carried: Indices of constants of the scan that travel with x.
        rows: Values of what the scan takes apart besides parameters, the same for all layers: by
            index.
        out: The structure of the output.
    """

    closed: ClosedJaxpr
    at: int
    stack_ids: tuple[int | None, ...]
    carried: tuple[int, ...]
    rows: dict[int, np.ndarray]
    out: Any

    @property
    def scan(self) -> Any:
        return self.closed.jaxpr.eqns[self.at]

    @property
    def body(self) -> ClosedJaxpr:
        return self.scan.params["jaxpr"]

    @property
    def num_consts(self) -> int:
        return scan_sizes(self.scan.params)[0]

    @property
    def num_carry(self) -> int:
        return scan_sizes(self.scan.params)[1]

    @property
    def inputs(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns the constants, the first carry, and what is taken apart."""
        split, end = self.num_consts, self.num_consts + self.num_carry
        invars = list(self.scan.invars)
        return invars[:split], invars[split:end], invars[end:]

    def before(self, atoms: Sequence[Any], *arguments: PyTree) -> list[Any]:
        """Returns values of the program before the scan."""
        return _evaluate(self.closed, range(self.at), atoms, [], jax.tree.leaves(arguments))

    def given_to_layer(
        self, given: Sequence[PyTree], w: list[Any], carried: list[Any], key: Any
    ) -> list[Any]:
        """Returns the constants of the scan for a layer, and what it takes apart."""
        consts, _, _ = self.inputs
        ids = [i for i, c in enumerate(consts) if i not in self.carried and not _is_key(c)]
        values = self.before([consts[i] for i in ids], *given)
        layer_inputs = dict(zip((*ids, *self.carried), (*values, *carried), strict=True))
        count = len(consts)
        for i, stack_id in enumerate(self.stack_ids, start=count):
            if stack_id is not None:
                layer_inputs[i] = w[stack_id]
            elif i - count in self.rows:
                layer_inputs[i] = self.rows[i - count]
        every = range(count + len(self.stack_ids))
        return [layer_inputs[i] if i in layer_inputs else jax.random.fold_in(key, i) for i in every]

    def behind(self, results: list[Any], *arguments: PyTree) -> PyTree:
        """Returns the output of the program, from the results of the scan."""
        eqns = [i for i in range(len(self.closed.jaxpr.eqns)) if i != self.at]
        more = list(self.scan.outvars)
        leaves = [*jax.tree.leaves(arguments), *results]
        outputs = _evaluate(self.closed, eqns, self.closed.jaxpr.outvars, more, leaves)
        return jax.tree.unflatten(self.out, outputs)


class ScanParts(Parts):
    """The parts of a module that runs its layers in a scan; `cut.layers` is their stack."""

    def layer_shapes(self, kind: int) -> PyTree:
        del kind  # there is one
        return jax.tree.map(partial(shape_of, skipped=1), self.cut.layers)

    def embed(self, outer: Outer, batch: PyTree, key: Any) -> Any:
        def one(outer: Outer, stack: PyTree, batch: PyTree, key: Any) -> Any:
            call, arguments = self.call(outer, stack, batch, key)
            consts, carry, _ = call.inputs
            atoms = [*carry, *(consts[i] for i in call.carried)]
            values = call.before(atoms, *arguments)
            return packed(values[: len(carry)], values[len(carry) :])

        return self.read(self.over_rows(one, 2), outer, self.cut.layers, batch, or_none(key))[0]

    def layer_and_extras(
        self, w: PyTree, shared: Outer, x: PyTree, batch: PyTree, key: Any, kind: int = 0
    ) -> tuple[PyTree, list[Any], dict[str, Any]]:
        del kind, shared  # there is one kind, and nothing is shared

        def one(outer: Any, stack: Any, w: Any, batch: Any, x: Any, key: Any) -> Any:
            call, arguments, w, x = self.call(outer, stack, batch, key, w, x)
            carry, carried = unpacked(x, call.carried)
            read = call.given_to_layer(arguments, jax.tree.leaves(w), carried, arguments[3])
            consts, xs = read[: call.num_consts], read[call.num_consts :]
            results = jaxpr_as_fun(call.body)(*consts, *carry, *xs)
            new, extras = results[: call.num_carry], results[call.num_carry :]
            return packed(new, carried), extras, {}

        run = self.over_rows(one, 3)
        return self.read(run, {}, self.cut.layers, w, batch, x, or_none(key))[0]

    def module_output(
        self, outer: Outer, batch: PyTree, x: PyTree, extras: list[Any], key: Any
    ) -> PyTree:
        def one(outer: Any, stack: Any, batch: Any, x: Any, extras: list[Any], key: Any) -> PyTree:
            call, arguments, x, extras = self.call(outer, stack, batch, key, x, extras)
            carry, _ = unpacked(x, call.carried)
            return call.behind([*carry, *extras], *arguments)

        run = self.over_rows(one, 2)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.cut.layers)
        return run(outer, zeros, batch, x, extras, or_none(key))

    def extras(self, batch: PyTree) -> list[list[jax.ShapeDtypeStruct]]:
        key = shape_of_key(self.cut.takes_key)
        arguments = self.cut.outer, self.cut.layers, self.row(batch), key
        call = self.call_of_form(frozenset(), arguments)
        shapes = [v.aval for v in call.body.jaxpr.outvars[call.num_carry :]]
        return [self.with_layers_and_rows(shapes, len(self.cut.names), batch)]

    def call(
        self, outer: Any, stack: Any, batch: PyTree, key: Any, *others: PyTree
    ) -> tuple[Any, ...]:
        """Returns the program for a batch, its arguments, and `others`, all of equal varying axes.

        A program that was traced for arrays that are equal on all ranks takes no others.
        """
        trees = (outer, stack, batch, key), *others
        arguments, *varying = match_varying_axes(trees, trees)
        return self.call_of_form(varying_axes(trees), arguments), arguments, *varying

    def call_of_form(self, axes: frozenset[str], given: tuple[PyTree, ...]) -> _ScannedCall:
        """Returns the program of the call on arrays that vary over these axes.

        Where they vary its equations have the mesh in their types. Shapes are asked for anywhere.
        """
        _, _, batch, key = given
        mesh = jax.sharding.get_abstract_mesh() if axes else None
        what = "call", axes, mesh, jax.tree.structure(key)
        return self.of_form(what, batch, lambda _: self.find_call(*given))

    def find_call(self, *given: PyTree) -> _ScannedCall:
        """Traces the call, finds the scan over layers, and checks it."""
        run = jax.make_jaxpr(lambda *given: self.cut.run(*given), return_shape=True)
        closed, out = run(*given)
        closed = _inlined(closed)
        first, count = (len(jax.tree.leaves(tree)) for tree in given[:2])
        stack = closed.jaxpr.invars[first : first + count]
        at = self.find_scan(closed, stack)
        call = _ScannedCall(
            closed=closed, at=at, stack_ids=(), carried=(), rows={}, out=jax.tree.structure(out)
        )
        consts, _, xs = call.inputs
        ids = tuple(stack.index(v) if _is_in(v, stack) else None for v in xs)
        sources, _ = dependent_inputs(lambda *given: call.before(consts, *given), *given)
        influenced = [any(jax.tree.leaves((used[0], used[3]))) for used in sources]
        carried = tuple(
            i for i, is_one in enumerate(influenced) if is_one and not _is_key(consts[i])
        )
        others = [i for i, one in enumerate(ids) if one is None and not _is_key(xs[i])]
        rows = self.equal_rows(call, [xs[i] for i in others], given)
        return replace(
            call, stack_ids=ids, carried=carried, rows=dict(zip(others, rows, strict=True))
        )

    def find_scan(self, closed: ClosedJaxpr, stack: Sequence[Any]) -> int:
        """Returns the index of the one scan that takes the stack apart."""
        name, count = self.cut.names[0].rpartition("[")[0], len(self.cut.names)
        uses = [
            (i, v)
            for i, eqn in enumerate(closed.jaxpr.eqns)
            for v in eqn.invars
            if _is_in(v, stack)
        ]
        uses += [(-1, v) for v in closed.jaxpr.outvars if _is_in(v, stack)]
        ids = {i for i, _ in uses}
        eqn = closed.jaxpr.eqns[min(ids)] if len(ids) == 1 and min(ids) >= 0 else None
        if eqn is None or eqn.primitive.name != "scan":
            readers = sorted(
                {"the output" if i < 0 else str(closed.jaxpr.eqns[i].primitive) for i in ids}
            )
            raise ValueError(
                f"`{name}` is a stack of layers, and the call of the module does not run it in "
                f"one `scan` over all layers: it is read by {', '.join(readers) or 'nothing'}. Run "
                "it by `nn.scan`, `nnx.scan` or `jax.lax.scan`, or give the layers as a list."
            )
        first_x = sum(scan_sizes(eqn.params))
        taken = eqn.invars[first_x:]
        if (
            eqn.params["reverse"]
            or eqn.params["length"] != count
            or len(uses) != sum(_is_in(v, stack) for v in taken)
        ):
            raise ValueError(
                f"The scan over `{name}` must take all {count} layers apart, from the first one to "
                f"the last. It has the length {eqn.params['length']}"
                + (" and runs backwards." if eqn.params["reverse"] else ".")
            )
        return min(ids)

    def equal_rows(
        self, call: _ScannedCall, atoms: list[Any], given: tuple[PyTree, ...]
    ) -> list[np.ndarray]:
        """Returns a row of constants that are the same for all layers."""
        part, used = pruned(lambda *given: call.before(atoms, *given), *given)
        name = self.cut.names[0].rpartition("[")[0]
        differ = ValueError(
            f"The scan over `{name}` gives layers other arrays than parameters and random keys, "
            "which differ by layer. Layers of one pipeline run one program: make them parameters, "
            "or pass the same to all layers."
        )
        if any(jax.tree.leaves(used)):
            raise differ
        with jax.ensure_compile_time_eval():
            values = [np.asarray(value) for value in part(*given)]
        if not all(np.array_equal(np.broadcast_to(v[:1], v.shape), v) for v in values):
            raise differ
        return [value[0] for value in values]


def _evaluate(
    closed: ClosedJaxpr,
    eqns: Sequence[int],
    atoms: Sequence[Any],
    more: Sequence[Any],
    leaves: Sequence[Any],
) -> list[Any]:
    """Evaluates some equations of a program, with more variables given."""
    jaxpr = closed.jaxpr.replace(
        invars=[*closed.jaxpr.invars, *more],
        eqns=[closed.jaxpr.eqns[i] for i in eqns],
        outvars=list(atoms),
    )
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))(*leaves)


def _inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program whose calls of compiled functions that have a scan are written out."""

    def inner(eqn: Any) -> Callable | None:
        is_call = eqn.primitive.name == "jit" and "scan[" in str(eqn.params["jaxpr"])
        return jaxpr_as_fun(_inlined(eqn.params["jaxpr"])) if is_call else None

    return rewritten(closed, inner)


def _is_in(atom: Any, variables: Sequence[Any]) -> bool:
    return any(atom is variable for variable in variables)


def _is_key(atom: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jax.dtypes.prng_key)
