"""Runs a function of arrays that stack L layers on layers that are stored in any way.

The user's tree may have leaves [L, ...]. The function is traced twice, for L layers and for one. An
equation that treats the dim of layers as rows (`jaxpipe.ir.rows`) runs as in the program of one
layer, batched over the layers. A reduction over layers runs so on each layer, and its results are
reduced. What follows depends on no layer and runs as it was traced.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr

from ..._compat import ClosedJaxpr
from ..graph import (
    Atom,
    Cond,
    Graph,
    Literal,
    PrimitiveCall,
    Scan,
    Var,
    aval_of,
    split_at,
    to_graph,
)
from ..rows import (
    EquationPair,
    MixesRowsError,
    Relation,
    Rows,
    Sum,
    Whole,
    relations_of,
    row_dim,
)
from ._assign import SMALL
from ._layer_ids import LayerIds, fill_padding, read_layer
from ._operands import Call, call_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """An array with a dim of layers, stored as parts: a pytree."""

    parts: tuple[Any, ...]  # arrays [lead, ...], whose other dims are those of one layer
    kind: str = field(metadata={"static": True})


class _Alike(NamedTuple):
    """An array with a dim of layers that is the same for each of them, such as zeros.

    As an array [L, ...] it would be as large as all layers, which no device stores.
    """

    value: Any  # that of one layer
    shape: tuple[int, ...]  # that of the array of all layers


def _of_all_layers(x: Any) -> Any:
    """Returns the array of all layers in place of one that is the same for each of them."""
    if not isinstance(x, _Alike):
        return x
    return jnp.tile(x.value, [n // m for n, m in zip(x.shape, x.value.shape, strict=True)])


def _least(dtype: Any) -> Any:
    return -jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min


def _greatest(dtype: Any) -> Any:
    return jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max


_REDUCERS: dict[str, Callable[..., Any]] = {
    "reduce_sum": jnp.sum,
    "reduce_max": jnp.max,
    "reduce_min": jnp.min,
    "reduce_prod": jnp.prod,
    "reduce_and": jnp.all,
    "reduce_or": jnp.any,
}
_NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": lambda dtype: 0,
    "reduce_max": _least,
    "reduce_min": _greatest,
    "reduce_prod": lambda dtype: 1,
    "reduce_and": lambda dtype: True,
    "reduce_or": lambda dtype: False,
}


def run_blocks(
    whole: ClosedJaxpr,
    part: ClosedJaxpr,
    inputs: Sequence[Any],
    out_kinds: Sequence[str | None],
    layer_ids: LayerIds,
    replicate: Callable[[Any], Any],
) -> list[Any]:
    """Runs a function of stacked layers; results are arrays, and `Blocks` for those with a kind.

    `replicate` returns a small array on all devices, from which single layers are read.
    """
    run = _BlocksRun(layer_ids, replicate, whole.jaxpr)
    graphs = to_graph(whole), to_graph(part)
    results = run.graph(*graphs, inputs)
    shapes = _shapes(*(graph.outputs for graph in graphs))
    return [
        _of_all_layers(result) if kind is None else run.as_blocks(result, kind, pair)
        for result, kind, pair in zip(results, out_kinds, shapes, strict=True)
    ]


Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""The shapes of a value in the program of all layers and in that of one."""


def _shape(atom: Atom) -> tuple[int, ...]:
    return tuple(aval_of(atom).shape)


def _shapes(whole: Sequence[Atom], part: Sequence[Atom]) -> list[Shapes]:
    return list(zip(map(_shape, whole), map(_shape, part), strict=True))


@dataclass(frozen=True)
class _BlocksRun:
    """Runs graphs of all layers and of one in lock-step, on layers as they are stored."""

    layer_ids: LayerIds
    replicate: Callable[[Any], Any]
    jaxpr: Jaxpr

    def count(self, kind: str) -> int:
        """Returns L."""
        return 1 + max(int(ids.max()) for ids in self.layer_ids[kind])

    def graph(self, whole: Graph, part: Graph, inputs: Sequence[Any]) -> list[Any]:
        """Runs the graph of all layers and that of one in lock-step."""
        env: dict[Var, Any] = dict(zip(whole.inputs, inputs, strict=True))
        partner: dict[Var, Atom] = dict(zip(whole.inputs, part.inputs, strict=True))

        def read(atom: Atom) -> Any:
            return atom.value if isinstance(atom, Literal) else env[atom]

        def partner_of(atom: Atom, other: Atom) -> bool:
            if isinstance(atom, Literal) or isinstance(other, Literal):
                return isinstance(atom, Literal) and isinstance(other, Literal)
            return partner.get(atom) is other

        def is_left_out(a: Call, operands: Sequence[Any]) -> bool:
            is_broadcast = a.name == "broadcast_in_dim" and isinstance(a.operands[0], Var)
            return is_broadcast and not any(isinstance(x, Blocks) for x in operands)

        calls_of_one = [call_of(eqn, self.jaxpr) for eqn in part.eqns]
        i = 0
        for eqn in whole.eqns:
            a = call_of(eqn, self.jaxpr)
            b = calls_of_one[i] if i < len(calls_of_one) else None
            operands = [read(x) for x in a.operands]
            is_pair = b is not None and a.name == b.name and len(a.operands) == len(b.operands)
            if b is not None and is_pair and all(map(partner_of, a.operands, b.operands)):
                i += 1
                env.update(zip(a.outputs, self.pair(a, b, operands), strict=True))
                partner.update(zip(a.outputs, b.outputs, strict=True))
            elif is_left_out(a, operands):  # of the program of one layer
                (env[a.outputs[0]],) = a.run(*map(_of_all_layers, operands))
                partner[a.outputs[0]] = partner[a.operands[0]]  # pyright: ignore[reportArgumentType]
            else:
                raise ValueError(_another_program(a))
        results = map(read, whole.outputs)
        return [x if isinstance(x, Blocks | _Alike) else jnp.asarray(x) for x in results]

    def pair(self, whole: Call, part: Call, operands: Sequence[Any]) -> Sequence[Any]:
        """Runs an equation of the program of all layers, given that of one layer."""
        kinds = {x.kind for x in operands if isinstance(x, Blocks)}
        if not kinds:
            return self.alike(whole, part, operands) or whole.run(*map(_of_all_layers, operands))
        if len(kinds) > 1:
            return self.mixed(whole, operands, "it is given layers of several kinds")
        (kind,) = kinds
        operation, other = whole.operation, part.operation
        match operation:
            case Scan(length=length):
                if not isinstance(other, Scan) or other.length != length:
                    raise ValueError(_another_program(whole))
                return self.scan(operation, other, kind, operands)
            case Cond(branches):
                assert isinstance(other, Cond)
                both = zip(branches, other.branches, strict=True)
                runs = [partial(self.branch, kind, a, b) for a, b in both]
                return lax.switch(operands[0], runs, *map(_of_all_layers, operands[1:]))
            case PrimitiveCall(name="while"):
                return self.while_loop(whole, part, kind, operands)
        return self.equation(whole, part, kind, operands)

    def alike(self, whole: Call, part: Call, operands: Sequence[Any]) -> list[_Alike]:
        """Runs a primitive for one layer if its results are the same for all; else returns []."""
        if whole.equation is None or part.equation is None:
            return []
        shapes = _shapes(whole.outputs, part.outputs)
        counts = {math.prod(a) // math.prod(b) for a, b in shapes if a != b and math.prod(b)}
        if len(counts) != 1:
            return []
        (count,) = counts
        relations: list[Relation] = []
        for x, (a, b) in zip(operands, _shapes(whole.operands, part.operands), strict=True):
            dim = row_dim(a, b, count)
            if isinstance(x, _Alike) and dim is not None:
                relations.append(Rows(dim, is_uniform=True))
            elif a == b:
                relations.append(Whole())
            else:
                return []
        pair = EquationPair(whole.equation, part.equation, tuple(relations), count)
        try:
            results = relations_of(pair)
        except MixesRowsError:
            return []
        if not all(isinstance(r, Rows) and r == Rows(r.dim, is_uniform=True) for r in results):
            return []
        of_one = part.run(*(x.value if isinstance(x, _Alike) else x for x in operands))
        return [_Alike(x, a) for x, (a, _) in zip(of_one, shapes, strict=True)]

    def equation(
        self, whole: Call, part: Call, kind: str, operands: Sequence[Any]
    ) -> Sequence[Any]:
        """Runs one primitive that reads layers of a kind."""
        if whole.equation is None:
            return self.mixed(whole, operands, "it is no primitive")
        count = self.count(kind)
        shapes = _shapes(whole.operands, part.operands)
        dims = [row_dim(*pair, count) for pair in shapes]
        if any(d is None and a != b for d, (a, b) in zip(dims, shapes, strict=True)):
            return self.mixed(whole, operands, "an operand has the layers in several dims")
        relations = tuple(Whole() if dim is None else Rows(dim) for dim in dims)
        try:
            results = relations_of(EquationPair(whole.equation, part.equation, relations, count))
        except MixesRowsError as error:
            axes = (call.equation and call.equation.params.get("axes") for call in (whole, part))
            if whole.name in _REDUCERS and {*axes} == {whole.equation.params["axes"]}:
                results = [Sum()]
            else:
                return self.mixed(whole, operands, str(error))
        blocks = [
            x if dim is None else self.as_blocks(x, kind, pair)
            for x, dim, pair in zip(operands, dims, shapes, strict=True)
        ]
        outputs = self.batched(part, kind, blocks)
        final: list[Any] = []
        for i, (output, relation) in enumerate(zip(outputs, results, strict=True)):
            match relation:
                case Rows(dim, is_squeezed=False):
                    if row_dim(_shape(whole.outputs[i]), _shape(part.outputs[i]), count) != dim:
                        return self.mixed(
                            whole, operands, "a result has the layers in several dims"
                        )
                    final.append(output)
                case Sum(0):
                    name = whole.name if whole.name in _REDUCERS else "reduce_sum"
                    final.append(self.reduced(output, name))
                case _:
                    return self.mixed(whole, operands, f"it returns {relation}")
        return final

    def batched(self, part: Call, kind: str, operands: Sequence[Any]) -> list[Blocks]:
        """Runs an equation of one layer on every layer."""
        axes = [0 if isinstance(x, Blocks) else None for x in operands]
        parts: list[Sequence[Any]] = []
        for index, ids in enumerate(self.layer_ids[kind]):
            run = part.run
            for _ in range(ids.ndim):
                run = jax.vmap(run, in_axes=axes)
            parts.append(run(*(x.parts[index] if isinstance(x, Blocks) else x for x in operands)))
        return [Blocks(tuple(of), kind) for of in zip(*parts, strict=True)]

    def reduced(self, blocks: Blocks, name: str) -> Any:
        """Returns the reduction of a value of each layer over all layers."""
        totals = []
        for part, ids in zip(blocks.parts, self.layer_ids[blocks.kind], strict=True):
            x = fill_padding(part, ids, _NEUTRAL[name](part.dtype))
            totals.append(_REDUCERS[name](x, axis=tuple(range(ids.ndim))).astype(x.dtype))
        total = totals[0]
        for other in totals[1:]:  # of other ranks
            total = _REDUCERS[name](jnp.stack([total, other]), axis=0).astype(total.dtype)
        return total

    def as_blocks(self, value: Any, kind: str, shapes: Shapes) -> Blocks:
        """Returns an array with a dim of layers as parts, if it is not."""
        if isinstance(value, Blocks):
            return value
        whole, part = shapes
        count = self.count(kind)
        dim = row_dim(whole, part, count)
        if isinstance(value, _Alike) and dim is not None:
            ids, one = self.layer_ids[kind], value.value
            return Blocks(tuple(jnp.broadcast_to(one, (*i.shape, *one.shape)) for i in ids), kind)
        if dim is None:
            raise ValueError(
                f"The optimizer has an array {list(whole)} for {count} layers and {list(part)} for "
                "one layer. Give `params['layers']` as a list of layers."
            )
        value = jnp.asarray(value).reshape(*whole[:dim], count, part[dim], *whole[dim + 1 :])
        value = jnp.moveaxis(value, dim, 0)
        return Blocks(tuple(value[np.maximum(ids, 0)] for ids in self.layer_ids[kind]), kind)

    def if_layers(self, kind: str, value: Any, shapes: Shapes) -> Any:
        """Returns an array as parts if it has a dim of layers."""
        return value if shapes[0] == shapes[1] else self.as_blocks(value, kind, shapes)

    def to_whole(self, blocks: Blocks, whole: tuple[int, ...], part: tuple[int, ...]) -> Any:
        """Returns a small array with a dim of layers from its parts."""
        count, ids = self.count(blocks.kind), self.layer_ids[blocks.kind]
        replicated = list(map(self.replicate, blocks.parts))
        layers = [read_layer(replicated, ids, layer) for layer in range(count)]
        dim = row_dim(whole, part, count)
        assert dim is not None
        return jnp.concatenate(layers, axis=dim)

    def mixed(self, whole: Call, operands: Sequence[Any], why: str) -> Sequence[Any]:
        """Runs an equation that mixes layers, if they are small."""
        values: list[Any] = []
        for x, atom in zip(operands, whole.operands, strict=True):
            if not isinstance(x, Blocks):
                values.append(_of_all_layers(x))
                continue
            shape, count = _shape(atom), self.count(x.kind)
            if math.prod(shape) > SMALL * count:
                raise ValueError(
                    f"`{whole.name}`{whole.where} mixes layers of an array {list(shape)}: "
                    f"{why}. A "
                    "pipeline has layers on different devices: it can only combine numbers of "
                    "layers, such as norms. Give `params['layers']` as a list of layers if each "
                    "is to be treated on its own."
                )
            lead = self.layer_ids[x.kind][0].ndim
            values.append(self.to_whole(x, shape, tuple(x.parts[0].shape[lead:])))
        return whole.run(*values)

    def scan(self, whole: Scan, part: Scan, kind: str, operands: Sequence[Any]) -> list[Any]:
        """Runs a `lax.scan` whose carry or slices have layers."""
        lead = self.layer_ids[kind][0].ndim
        ends = whole.num_consts, whole.num_consts + whole.num_carry
        shapes = _shapes(whole.body.inputs, part.body.inputs)
        as_in_body = partial(self.if_layers, kind)
        consts = list(map(as_in_body, operands[: ends[0]], shapes[: ends[0]]))
        carry = list(map(as_in_body, operands[ends[0] : ends[1]], shapes[ends[0] : ends[1]]))
        xs = [_moved(_of_all_layers(x), lead, 0) for x in operands[ends[1] :]]
        out_shapes = _shapes(whole.body.outputs, part.body.outputs)

        def turn(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            results = self.graph(whole.body, part.body, [*consts, *carry, *xs])
            results = list(map(as_in_body, results, out_shapes))
            return results[: whole.num_carry], results[whole.num_carry :]

        carry, ys = lax.scan(turn, carry, xs, whole.length, whole.reverse, whole.unroll)
        return [*carry, *(_moved(y, 0, lead) for y in ys)]

    def branch(self, kind: str, whole: Graph, part: Graph, *operands: Any) -> list[Any]:
        """Runs a branch, whose results with a dim of layers are parts in every branch."""
        shapes = _shapes(whole.outputs, part.outputs)
        return list(map(partial(self.if_layers, kind), self.graph(whole, part, operands), shapes))

    def while_loop(self, whole: Call, part: Call, kind: str, operands: Sequence[Any]) -> list[Any]:
        """Runs a `lax.while_loop` whose state has layers."""
        assert whole.equation is not None and part.equation is not None
        params, others = whole.equation.params, part.equation.params
        ends = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        of_cond, of_body, state = split_at(operands, ends)
        cond = [to_graph(p["cond_jaxpr"]) for p in (params, others)]
        body = [to_graph(p["body_jaxpr"]) for p in (params, others)]
        as_parts = partial(self.if_layers, kind)
        first = list(map(as_parts, state, _shapes(body[0].outputs, body[1].outputs)))
        return lax.while_loop(
            lambda state: self.graph(cond[0], cond[1], [*of_cond, *state])[0],
            lambda state: self.branch(kind, body[0], body[1], *of_body, *state),
            first,
        )


def _another_program(call: Call) -> str:
    return (
        f"The optimizer is another program for one layer than for several: `{call.name}`"
        f"{call.where}. Give `params['layers']` as a list of layers."
    )


def _moved(x: Any, source: int, to: int) -> Any:
    """Returns slices of a scan in front of, or behind, the dims of layers."""
    if not isinstance(x, Blocks):
        return x
    return Blocks(tuple(jnp.moveaxis(part, source, to) for part in x.parts), x.kind)
