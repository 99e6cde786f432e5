"""What XLA makes of a layer: which operations run as one, what they read and write, what lives.

A play of the traced program. Its rules are those of XLA:TPU's fusions as fifteen programs show
them (docs/dev/LOG.md): element-wise operations run inside of the products that read them, or of the
product whose result they alone read; what several products read is stored if that moves less. On
GPUs products read and write stored arrays alone. All bytes are those that a row adds.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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
    is_cheap,
    is_invertible_move,
    is_light,
    repeats_of,
    terms_of_product,
    to_graph,
    variables,
)
from ..kernels import ATTENTION
from ._divided import divided, multiplies

_PARTS = ("gather", "slice", "dynamic_slice", "split")
"""Light operations that read a part of an array."""
_IN_THEIR_OWN_TIME = (
    *("all_gather", "reduce_scatter", "all_to_all", "ppermute", "psum", "psum_invariant"),
    ATTENTION.name,
)
"""Operations whose bytes are in their own time."""
_TRANSCENDENTAL = "exp exp2 expm1 log log1p log2 logistic tanh erf erfc"
_TPU_BYTES, _TRANSCENDENTAL_BYTES = 0.8, 5.5
"""What counts on TPUs for each byte that moves, and for each result of one of these functions, in
bytes at the rate of published steps. Read off the cycles of twenty programs for v5p: softmax takes
two to three times as long as its bytes, and an associative scan as long as its bytes."""

_BODIES = {"while": "body_jaxpr", "custom_vmap_call": "call"}

_RowBytes = Mapping[Var, float]


class _OtherOperationsError(Exception):
    """Graphs for two numbers of rows have other operations."""


class FusedLayer(NamedTuple):
    """What a row adds to a layer's work beside its products, as compilers fuse it, on a device.

    Attributes:
        kept_share: The part of what the layer keeps that a device of `tensor` has.
        live: Bytes at the peak of a backward that computes its forward again. The cotangent between
            layers is among them, what layers keep is not.
        moved: Bytes that a forward reads and writes.
        moved_back: Bytes that a backward reads and writes, without its forward.
        num_kernels: Operations of a forward that are left.
    """

    kept_share: float
    live: float
    moved: float
    moved_back: float
    num_kernels: int


class _PlayedGraph(NamedTuple):
    """What a graph does with a row: bytes at its peak, bytes that it moves, and its operations."""

    peak: float
    moved: float
    num_kernels: int


@dataclass(frozen=True)
class _Fusion:
    """Operations that run as one.

    Attributes:
        read: The bytes of a row that it reads of each stored array.
        made: The bytes of a row in each array that it stores.
        in_place: Whether its first result may take the place of an array that nothing reads later.
        moved: The bytes of a row that it reads and writes, beside those of products.
        num_kernels: Operations that are left.
        inside: The bytes of a row that lives in its body.
    """

    read: _RowBytes
    made: _RowBytes
    in_place: bool
    moved: float
    num_kernels: int
    inside: float


class _Behind(NamedTuple):
    """What an array that is not stored is computed from: stored arrays, and slow operations.

    Attributes:
        read: The bytes of a row of each stored array.
        slow: The numbers of a row in the results of transcendental functions.
    """

    read: _RowBytes
    slow: _RowBytes


class _Compiler(NamedTuple):
    """The compiler of a graph, and the arrays of which a device has one of several parts."""

    on_gpu: bool
    divided: frozenset[Var]
    parts: int

    def row_bytes(self, few: Var, more: Var) -> float:
        """Returns the bytes that a row adds to an array, as it has them in two graphs."""
        return (more.num_bytes - few.num_bytes) / (self.parts if few in self.divided else 1)


def fused_layer(
    layer: Callable,
    weights: PyTree,
    *of_rows: tuple[PyTree, ...],
    on_gpu: bool = False,
    dims: Sequence[int | None] = (),
    parts: int = 1,
) -> FusedLayer:
    """Plays a forward and a backward of a layer.

    Args:
        layer: `(weights, x, batch, key) -> x`.
        weights: The weights that it reads, or their shapes.
        of_rows: Twice x, batch and key: of several rows, and of one more.
        on_gpu: Whether XLA:GPU compiles it.
        dims: The dim of each weight that `tensor` divides.
        parts: The size of `tensor`.

    Returns:
        The bytes that a row adds on a device, and the operations of a forward.

    Raises:
        ValueError: If the operations of the layer depend on how many rows there are.
    """
    played = []
    for trace in (_forward, _backward):
        few, more = (trace(layer, weights, *arguments) for arguments in of_rows)
        compiler = _Compiler(on_gpu, divided(few, dims).arrays, parts)
        try:
            played.append(_play(few, more, compiler))
        except _OtherOperationsError:
            raise ValueError(
                "The operations of a layer depend on how many rows it is given, so what a row adds "
                "cannot be counted. Give a layer that treats all numbers of rows alike."
            ) from None
    forward, backward = played
    kept = _kept_share(layer, weights, of_rows, dims, parts) if parts > 1 else 1.0
    few, more = (jax.tree.leaves(x) for x, *_ in of_rows)
    cotangent = sum((y.size - x.size) * x.dtype.itemsize for x, y in zip(few, more, strict=True))
    moved_back = max(0.0, backward.moved - forward.moved)
    live = backward.peak + cotangent
    return FusedLayer(kept, live, forward.moved, moved_back, forward.num_kernels)


def _kept_share(
    layer: Callable,
    weights: PyTree,
    of_rows: tuple[tuple[PyTree, ...], ...],
    dims: Sequence[int | None],
    parts: int,
) -> float:
    """Returns the part of a layer's residuals that a device has of `parts`."""

    def residuals(*arguments: PyTree) -> Graph:
        return _forward(pullback(layer, *arguments).forward, *arguments)

    one, other = (residuals(weights, *arguments) for arguments in of_rows)
    arrays = divided(one, dims).arrays
    compilers = _Compiler(False, frozenset(), 1), _Compiler(False, arrays, parts)
    num_results = len(jax.tree.leaves(of_rows[0][0]))
    pairs = [*zip(one.outputs, other.outputs, strict=True)][num_results:]
    whole, own = (
        sum(t.row_bytes(x, y) for x, y in pairs if isinstance(x, Var) and isinstance(y, Var))
        for t in compilers
    )
    return own / whole if whole else 1.0


def _forward(layer: Callable, *arguments: PyTree) -> Graph:
    return to_graph(jax.make_jaxpr(layer)(*arguments), prints=True)


def _backward(layer: Callable, weights: PyTree, x: PyTree, batch: PyTree, key: PyTree) -> Graph:
    """Traces the gradients of a layer, by its weights and by x."""
    pulled = pullback(layer, weights, x, batch, key)

    def run(weights: PyTree, x: PyTree, batch: PyTree, key: PyTree, cotangent: PyTree) -> PyTree:
        _, residuals = pulled.forward(weights, x, batch, key)
        return pulled.backward(weights, batch, key, residuals, cotangent)[:2]

    cotangent = floating(jax.eval_shape(layer, weights, x, batch, key))
    return _forward(run, weights, x, batch, key, cotangent)


def _play(few: Graph, more: Graph, compiler: _Compiler) -> _PlayedGraph:
    """Plays the fusions of a graph, each as soon as it frees as much as it makes.

    Others run in their order. What the graph is given and what it returns does not live in it.
    """
    fusions = list(_fusions(few, more, compiler))
    moved = sum(fusion.moved for fusion in fusions)
    num_kernels = sum(fusion.num_kernels for fusion in fusions)
    returned = frozenset(variables(few.outputs))
    waiting = dict(enumerate(fusions))
    unread = Counter(x for fusion in fusions for x in fusion.read)
    unmade = {x for fusion in fusions for x in fusion.made}
    alive: dict[Var, float] = {}
    now = peak = 0.0

    def change(fusion: _Fusion) -> tuple[dict[Var, float], list[Var]]:
        new = {x: n for x, n in fusion.made.items() if unread[x] and x not in returned}
        return new, [x for x in fusion.read if unread[x] == 1 and x in alive]

    def frees(fusion: _Fusion) -> bool:
        new, ended = change(fusion)
        return sum(new.values()) <= sum(alive[x] for x in ended)

    while waiting:
        ready = [i for i, fusion in waiting.items() if unmade.isdisjoint(fusion.read)]
        index = next((i for i in ready if frees(waiting[i])), ready[0])
        fusion = waiting.pop(index)
        for other in ready:  # XLA makes one of those that read the same array
            if other != index and _share(fusion, waiting[other]):
                both = waiting.pop(other)
                unread.subtract(fusion.read.keys() & both.read.keys())
                fusion = replace(
                    fusion, read={**fusion.read, **both.read}, made={**fusion.made, **both.made}
                )
        new, ended = change(fusion)
        made, freed = sum(new.values()), sum(alive[x] for x in ended)
        first = next(iter(new.values()), 0.0)
        replaces = fusion.in_place and any(alive[x] >= first for x in ended)
        peak = max(peak, now + made - replaces * first + fusion.inside)
        unread.subtract(fusion.read.keys())
        unmade.difference_update(fusion.made)
        for x in ended:
            del alive[x]
        alive |= new
        now += made - freed
    return _PlayedGraph(peak, moved, num_kernels)


def _share(one: _Fusion, other: _Fusion) -> bool:
    """Returns whether two fusions of element-wise operations read the same array with rows."""
    both = one.in_place and other.in_place
    return both and any(one.read[x] for x in one.read.keys() & other.read.keys())


def _fusions(few: Graph, more: Graph, compiler: _Compiler) -> Iterator[_Fusion]:
    """Yields the fusions of a graph in the order of its operations."""
    if [*map(_kind, few.eqns)] != [*map(_kind, more.eqns)]:
        raise _OtherOperationsError
    pairs = [*zip(few.inputs, more.inputs, strict=True)]
    for eqn, other in zip(few.eqns, more.eqns, strict=True):
        pairs += zip(eqn.outputs, other.outputs, strict=True)
    row_bytes = {x: compiler.row_bytes(x, y) for x, y in pairs}
    fuser = _Fuser(few, row_bytes, compiler.on_gpu)
    behind: dict[Var, _Behind] = {}  # what is not stored
    for eqn, other in zip(few.eqns, more.eqns, strict=True):
        inputs = variables(eqn.inputs)
        read: dict[Var, float] = {}
        slow: dict[Var, float] = {}
        for x in inputs:
            one = behind.get(x, _Behind({x: row_bytes[x]}, {}))
            read |= one.read
            slow |= one.slow
        if _name(eqn) in _TRANSCENDENTAL.split():
            slow |= {x: row_bytes[x] / x.aval.dtype.itemsize for x in eqn.outputs}
        if _name(eqn) in _PARTS:
            of_part = sum(row_bytes[x] for x in eqn.outputs)
            read = {x: min(n, of_part) for x, n in read.items()}
        is_alias = _is_reshaped(eqn) and inputs[0] not in behind
        if is_alias or not fuser.stores(eqn, sum(read.values())):
            behind.update(dict.fromkeys(eqn.outputs, _Behind(read, slow)))
            continue
        made = {x: row_bytes[x] / (2 if fuser.narrows(x) else 1) for x in eqn.outputs}
        in_product = eqn.outputs[0] in fuser.last
        body = _body(eqn, other, compiler)
        if body:
            moved, kernels = body.moved, body.num_kernels
        elif in_product or _is_product(eqn):
            moved, kernels = 0.0, 1
        elif _name(eqn).startswith("scatter"):  # rows are read, added to, and written
            moved, kernels = 3 * row_bytes.get(inputs[-1], 0.0), 1
        else:
            moved, kernels = sum(read.values()) + sum(made.values()), 1
            if not compiler.on_gpu:
                moved = _TPU_BYTES * moved + _TRANSCENDENTAL_BYTES * sum(slow.values())
        in_place = _fuses(eqn) and not in_product and not compiler.on_gpu
        yield _Fusion(read, made, in_place, moved, kernels, body.peak if body else 0.0)


def _body(eqn: Eqn, other: Eqn, compiler: _Compiler) -> _PlayedGraph | None:
    """Plays the body of an operation, by that of the same one with a row more."""
    pairs = zip(_bodies(eqn), _bodies(other), strict=True)
    played = [_play(*pair, compiler) for pair in pairs]
    if not played:
        return None
    peak, moved, kernels = map(max, zip(*played, strict=True))
    match eqn.operation:
        case Scan(length=length):
            return _PlayedGraph(peak, length * moved, length * kernels)
        case ShardMap(num_devices=num):  # rows inside are those of one device
            return _PlayedGraph(num * peak, num * moved, kernels)
    return _PlayedGraph(peak, moved, kernels)


def _bodies(eqn: Eqn) -> Sequence[Graph]:
    match eqn.operation:
        case Scan(body=body) | ShardMap(body=body):
            return (body,)
        case Cond(branches=branches):
            return branches
        case PrimitiveCall(name=name, params=params) if name in _BODIES:
            return (to_graph(params[_BODIES[name]], keep_dead=True, prints=True),)
    return ()


class _Fuser:
    """Says which arrays of a graph are stored.

    Attributes:
        row_bytes: The bytes of a row in each array.
        on_gpu: Whether XLA:GPU compiles it.
        inner: Results of products that are not stored, as one chain of element-wise operations
            reads them, and what is between.
        last: The ends of such chains, which the product stores.
    """

    def __init__(self, graph: Graph, row_bytes: _RowBytes, on_gpu: bool):
        self.row_bytes, self.on_gpu = row_bytes, on_gpu
        self._returned = frozenset(variables(graph.outputs))
        self._readers: dict[Var, list[Eqn]] = defaultdict(list)
        for eqn in graph.eqns:
            for x in dict.fromkeys(variables(eqn.inputs)):
                self._readers[x].append(eqn)
        self.inner, self.last = set[Var](), set[Var]()
        for eqn in graph.eqns:
            if not on_gpu and multiplies(eqn):
                chain = self._chain(eqn.outputs[0])
                self.inner.update(chain[:-1])
                self.last.update(chain[1:][-1:])

    def _chain(self, x: Var) -> list[Var]:
        """Returns a product's result, and what is computed where it is, to what is stored."""
        chain, end = [x], 1
        own = smallest = self.row_bytes[x]
        while own and x not in self._returned and len(self._readers[x]) == 1:
            (reader,) = self._readers[x]
            x, *others = reader.outputs
            is_taken = x in self.inner | self.last
            if others or is_taken or not _fuses(reader) or self.row_bytes[x] > own:
                break
            chain.append(x)
            if self.row_bytes[x] <= smallest:
                smallest, end = self.row_bytes[x], len(chain)
        return chain[:end]

    def stores(self, eqn: Eqn, amount: float) -> bool:
        """Returns whether results are stored that are computed from so many bytes of a row."""
        first = eqn.outputs[0]
        if first in self.inner:
            return False
        if first in self.last or not _fuses(eqn):
            return True
        return any(x in self._returned or self._saves(x, amount) for x in eqn.outputs)

    def _saves(self, x: Var, amount: float) -> bool:
        """Returns whether it moves less, or is the only way, to store an array.

        If it is not stored, each product that reads it reads the bytes that it is computed from; if
        it is, it is written, and read.
        """
        readers = [eqn for eqn in self._readers[x] if not is_light(eqn) or _spreads(eqn)]
        num_products = 0 if self.on_gpu else sum(map(multiplies, readers))
        if len(readers) > num_products:
            return True
        return 0 < self.row_bytes[x] * (1 + num_products) < amount * num_products

    def narrows(self, x: Var) -> bool:
        """Returns whether float32 numbers are stored as bfloat16, as products alone read them."""
        readers = self._readers[x]
        is_float32 = x.aval.dtype == jnp.float32
        return not self.on_gpu and is_float32 and bool(readers) and all(map(_rounds, readers))


def _rounds(eqn: Eqn) -> bool:
    """Returns whether an equation is a product that XLA:TPU computes in bfloat16."""
    default = jax.lax.Precision.DEFAULT
    params = eqn.operation.params if isinstance(eqn.operation, PrimitiveCall) else {}
    return multiplies(eqn) and params["precision"] in (None, (default, default))


def _fuses(eqn: Eqn) -> bool:
    return is_cheap(eqn) and not _spreads(eqn)


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


def _is_product(eqn: Eqn) -> bool:
    """Returns whether the bytes of an operation are in its own time, as those of products are."""
    if _name(eqn) in _IN_THEIR_OWN_TIME:
        return True
    equation = getattr(eqn.operation, "equation", None)
    return equation is not None and any(
        terms_of_product(each) is not None for each, _ in repeats_of(equation)
    )


def _kind(eqn: Eqn) -> tuple[type, str]:
    return type(eqn.operation), _name(eqn)


def _name(eqn: Eqn) -> str:
    return eqn.operation.name if isinstance(eqn.operation, PrimitiveCall) else ""


def _is_reshaped(eqn: Eqn) -> bool:
    """Returns whether an equation has the elements of one array in the same order."""
    if not variables(eqn.inputs) or not is_invertible_move(eqn) or _name(eqn) == "transpose":
        return False
    return variables(eqn.inputs)[0].aval.dtype == eqn.outputs[0].aval.dtype
