"""What lives at a time while XLA computes the backward of a layer, and its forward again.

A play of the traced program. Its rules are those of XLA:TPU's fusions as fifteen programs show
them (docs/dev/LOG.md): element-wise operations run inside of the products that read them, or of the
product whose result they alone read; what several products read is stored if that moves less.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..autodiff.backward import floating, pullback
from ..ir.graph import (
    Cond,
    Eqn,
    Graph,
    PrimitiveCall,
    Scan,
    ShardMap,
    Var,
    is_light,
    terms_of_product,
    to_graph,
    variables,
)
from ._fused_work import reduces

_RowBytes = Mapping[Var, float]
"""The bytes that a row adds to an array; 0 for those without rows."""


@dataclass(frozen=True)
class _Fusion:
    """Operations that run as one.

    Attributes:
        read: The stored arrays that it reads.
        made: The bytes of a row in each array that it stores.
        in_place: Whether its first result may take the place of an array that nothing reads later.
        inside: The bytes of a row that a body needs beside these.
    """

    read: frozenset[Var]
    made: Mapping[Var, float]
    in_place: bool
    inside: float = 0.0


def live_bytes(
    layer: Callable, weights: PyTree, *of_rows: tuple[PyTree, ...], on_gpu: bool = False
) -> float:
    """Returns the bytes of a row at the peak of a backward that computes its forward again.

    Args:
        layer: `(weights, x, batch, key) -> x`.
        weights: The weights that it reads, or their shapes.
        of_rows: Twice x, batch and key: of several rows, and of one more.
        on_gpu: Whether XLA:GPU compiles it, whose products read and write stored arrays alone.

    Returns:
        The bytes, those of the cotangent between layers among them, without what layers keep.
    """
    few, more = (_backward(layer, weights, *arguments) for arguments in of_rows)
    try:
        row_bytes = dict(_row_bytes(few, more))
    except ValueError:  # its operations depend on how many rows there are
        num_rows = jax.tree.leaves(of_rows[0][0])[0].shape[0]
        row_bytes = {x: x.num_bytes / num_rows for x, _ in _row_bytes(few, few)}
    x, x_of_more = (jax.tree.leaves(x) for x, *_ in of_rows)
    pairs = zip(x, x_of_more, strict=True)
    cotangent = sum((y.size - x.size) * x.dtype.itemsize for x, y in pairs)
    return _peak(few, row_bytes, on_gpu) + cotangent


def _backward(layer: Callable, weights: PyTree, x: PyTree, batch: PyTree, key: PyTree) -> Graph:
    """Traces the gradients of a layer, by its weights and by x."""
    pulled = pullback(layer, weights, x, batch, key)

    def run(weights: PyTree, x: PyTree, batch: PyTree, key: PyTree, cotangent: PyTree) -> PyTree:
        _, residuals = pulled.forward(weights, x, batch, key)
        return pulled.backward(weights, batch, key, residuals, cotangent)[:2]

    cotangent = floating(jax.eval_shape(layer, weights, x, batch, key))
    return to_graph(jax.make_jaxpr(run)(weights, x, batch, key, cotangent), prints=True)


def _row_bytes(few: Graph, more: Graph) -> Iterator[tuple[Var, float]]:
    """Yields each array of a graph, and by how many bytes it is larger in one with a row more.

    Raises:
        ValueError: If the graphs have other operations.
    """
    for one, other in zip(few.inputs, more.inputs, strict=True):
        yield one, other.num_bytes - one.num_bytes
    for one, other in zip(few.eqns, more.eqns, strict=True):
        for x, y in zip(one.outputs, other.outputs, strict=True):
            yield x, y.num_bytes - x.num_bytes
        for pair in zip(_bodies(one), _bodies(other), strict=True):
            yield from _row_bytes(*pair)


def _bodies(eqn: Eqn) -> Sequence[Graph]:
    match eqn.operation:
        case Scan(body=body) | ShardMap(body=body):
            return (body,)
        case Cond(branches=branches):
            return branches
    return ()


def _peak(graph: Graph, row_bytes: _RowBytes, on_gpu: bool) -> float:
    """Plays the fusions of a graph, each as soon as it frees as much as it makes.

    Others run in their order. What the graph is given and what it returns does not count.
    """
    returned = frozenset(variables(graph.outputs))
    waiting = dict(enumerate(_fusions(graph, row_bytes, on_gpu)))
    unread = Counter(x for fusion in waiting.values() for x in fusion.read)
    unmade = {x for fusion in waiting.values() for x in fusion.made}
    alive: dict[Var, float] = {}
    now = peak = 0.0

    def change(fusion: _Fusion) -> tuple[dict[Var, float], list[Var]]:
        new = {x: n for x, n in fusion.made.items() if unread[x] and x not in returned}
        return new, [x for x in fusion.read if unread[x] == 1 and x in alive]

    def frees(fusion: _Fusion) -> bool:
        new, ended = change(fusion)
        return sum(new.values()) <= sum(alive[x] for x in ended)

    while waiting:
        ready = [i for i, fusion in waiting.items() if not fusion.read & unmade]
        index = next((i for i in ready if frees(waiting[i])), ready[0])
        fusion = waiting.pop(index)
        for other in ready:  # XLA makes one of those that read the same array
            if other != index and _share(fusion, waiting[other], row_bytes):
                fusion = _merged(fusion, both := waiting.pop(other))
                unread.subtract(fusion.read & both.read)
        new, ended = change(fusion)
        made, freed = sum(new.values()), sum(alive[x] for x in ended)
        first = next(iter(new.values()), 0.0)
        replaces = fusion.in_place and any(alive[x] >= first for x in ended)
        peak = max(peak, now + made - replaces * first + fusion.inside)
        unread.subtract(fusion.read)
        unmade.difference_update(fusion.made)
        for x in ended:
            del alive[x]
        alive |= new
        now += made - freed
    return peak


def _num_programs(eqn: Eqn) -> int:
    """Returns how many devices run the body of a `jax.shard_map`, whose rows are those of one."""
    match eqn.operation:
        case ShardMap(mesh=mesh, axes=axes):
            return math.prod(mesh.shape[axis] for axis in axes)
    return 1


def _share(one: _Fusion, other: _Fusion, row_bytes: _RowBytes) -> bool:
    """Returns whether two fusions of element-wise operations read the same array with rows."""
    both = one.in_place and other.in_place
    return both and any(row_bytes[x] for x in one.read & other.read)


def _merged(one: _Fusion, other: _Fusion) -> _Fusion:
    return _Fusion(one.read | other.read, {**one.made, **other.made}, in_place=True)


def _fusions(graph: Graph, row_bytes: _RowBytes, on_gpu: bool) -> Iterator[_Fusion]:
    """Yields the fusions of a graph in the order of its operations."""
    readers: dict[Var, list[Eqn]] = defaultdict(list)
    for eqn in graph.eqns:
        for x in dict.fromkeys(variables(eqn.inputs)):
            readers[x].append(eqn)
    returned = frozenset(variables(graph.outputs))
    inner, last = set[Var](), set[Var]()
    if not on_gpu:
        inner, last = _epilogues(graph, row_bytes, readers, returned)
    behind: dict[Var, frozenset[Var]] = {}  # of what is not stored: the stored arrays it is from
    for eqn in graph.eqns:
        inputs = variables(eqn.inputs)
        read = frozenset[Var]().union(*(behind.get(x, {x}) for x in inputs))
        first, in_product = eqn.outputs[0], eqn.outputs[0] in last
        amount = sum(row_bytes[x] for x in read)
        is_stored = in_product or not _fuses(eqn) or not returned.isdisjoint(eqn.outputs)
        if first in inner or not (
            is_stored
            or any(_is_stored(amount, row_bytes[x], readers[x], on_gpu) for x in eqn.outputs)
        ):
            behind.update(dict.fromkeys(eqn.outputs, read))
            continue
        inside = max((_peak(body, row_bytes, on_gpu) for body in _bodies(eqn)), default=0.0)
        narrowed = [not on_gpu and _is_narrowed(x, readers[x]) for x in eqn.outputs]
        yield _Fusion(
            read=read,
            made={x: row_bytes[x] / (1 + n) for x, n in zip(eqn.outputs, narrowed, strict=True)},
            in_place=_fuses(eqn) and not in_product and not on_gpu,
            inside=_num_programs(eqn) * inside,
        )


def _epilogues(
    graph: Graph, row_bytes: _RowBytes, readers: Mapping[Var, list[Eqn]], returned: frozenset[Var]
) -> tuple[set[Var], set[Var]]:
    """Finds element-wise operations that run where a product is computed, which they alone read.

    Returns:
        The arrays that are not stored because of that, and those that are stored instead.
    """
    inner, last = set[Var](), set[Var]()
    for eqn in filter(_multiplies, graph.eqns):
        chain = [x := eqn.outputs[0]]
        own = smallest = row_bytes[x]
        end = 1
        while own and x not in returned and len(readers[x]) == 1 and _fuses(*readers[x]):
            x, *others = readers[x][0].outputs
            if others or x in inner | last or row_bytes[x] > own:
                break
            chain.append(x)
            if row_bytes[x] <= smallest:
                smallest, end = row_bytes[x], len(chain)
        inner.update(chain[: end - 1])
        last.update(chain[1:end][-1:])
    return inner, last


def _is_stored(amount: float, own: float, readers: Sequence[Eqn], on_gpu: bool) -> bool:
    """Returns whether an array is stored that is computed from so many stored bytes of a row.

    If it is not, each product that reads it reads those; if it is, it is written, and read.
    """
    heavy = [eqn for eqn in readers if not _fuses(eqn) and not reduces(eqn)]
    num_products = sum(map(_multiplies, heavy)) * (not on_gpu)
    saves = 0 < own * (1 + num_products) < amount * num_products
    return len(heavy) > num_products or saves


def _is_narrowed(x: Var, readers: Sequence[Eqn]) -> bool:
    """Returns whether XLA:TPU stores float32 numbers as bfloat16, as products read nothing else."""
    return x.aval.dtype == jnp.float32 and bool(readers) and all(map(_rounds, readers))


def _rounds(eqn: Eqn) -> bool:
    """Returns whether an equation is a product that XLA:TPU computes in bfloat16."""
    default = jax.lax.Precision.DEFAULT
    return _multiplies(eqn) and eqn.operation.params["precision"] in (None, (default, default))


def _fuses(eqn: Eqn) -> bool:
    return is_light(eqn) and not reduces(eqn) and not _spreads(eqn)


def _spreads(eqn: Eqn) -> bool:
    """Returns whether an operation takes every n-th number of a dim, or puts others between."""
    if not isinstance(eqn.operation, PrimitiveCall):
        return False
    params = eqn.operation.params
    match eqn.operation.name:
        case "slice":
            return any(stride != 1 for stride in params["strides"] or ())
        case "pad":
            return any(between for _, _, between in params["padding_config"])
    return False


def _multiplies(eqn: Eqn) -> bool:
    equation = getattr(eqn.operation, "equation", None)
    return equation is not None and terms_of_product(equation) is not None
