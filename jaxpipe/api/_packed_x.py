"""Layers that return another x than they are given, such as those of a U-Net.

Engines hand over one x, of the same structure and shapes between all layers. Here a row of x
becomes one vector for each dtype, as long as that of the largest x, which layers unpack and pack
again.
b rows, K numbers of a row in the largest x.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..autodiff.staged_model import HandOver
from ..engines import PipelineSpec
from ..schedules import language
from ._layer_results import x_and_aux
from ._model import Model, ModelFunction, with_call
from ._pieces import num_rows, on_pieces, shape_of


@dataclass(frozen=True)
class XType:
    """The structure of x at a boundary of layers, and the shape and dtype of leaves of a row."""

    tree: Any
    leaves: tuple[tuple[tuple[int, ...], Any], ...]

    def shapes(self, num_rows: int) -> PyTree:
        """Returns the shapes of x of so many rows."""
        leaves = [jax.ShapeDtypeStruct((num_rows, *shape), dtype) for shape, dtype in self.leaves]
        return self.tree.unflatten(leaves)

    @property
    def widths(self) -> dict[str, int]:
        """Returns the count of numbers of each dtype in a row."""
        sums: dict[str, int] = {}
        for shape, dtype in self.leaves:
            sums[dtype.name] = sums.get(dtype.name, 0) + math.prod(shape)
        return sums

    def __str__(self) -> str:
        leaves = [f"{dtype.name}[b, {', '.join(map(str, shape))}]" for shape, dtype in self.leaves]
        return str(self.tree.unflatten(leaves)).replace("'", "")


@dataclass(frozen=True)
class PackedX:
    """The types of x, and the vectors that take its place.

    Attributes:
        kinds: The kind of every layer, in forward order.
        entering: The type of x that enters each layer, in forward order, and that which enters the
            loss.
        widths: K, the numbers of a row in each vector, by the name of its dtype.
    """

    kinds: tuple[str, ...]
    entering: tuple[XType, ...]
    widths: Mapping[str, int]

    def pack(self, x: PyTree, x_type: XType) -> dict[str, Any]:
        """Returns [b, K] arrays by dtype, with zeros where this x has fewer numbers."""
        by_dtype: dict[str, list[Any]] = {name: [] for name in self.widths}
        rows = num_rows(x)
        for leaf, (_, dtype) in zip(jax.tree.leaves(x), x_type.leaves, strict=True):
            by_dtype[dtype.name].append(jnp.reshape(leaf, (rows, -1)))
        return {
            name: _filled(parts, rows, self.widths[name], name) for name, parts in by_dtype.items()
        }

    def unpack(self, packed: dict[str, Any], x_type: XType) -> PyTree:
        """Returns x: the inverse of `pack`."""
        starts, leaves = dict.fromkeys(packed, 0), []
        for shape, dtype in x_type.leaves:
            first, flat = starts[dtype.name], packed[dtype.name]
            starts[dtype.name] += math.prod(shape)
            part = flat[:, first : starts[dtype.name]]
            leaves.append(jnp.reshape(part, (flat.shape[0], *shape)))
        return x_type.tree.unflatten(leaves)

    def hand_overs(self, layers_of_stages: Sequence[range]) -> tuple[HandOver, ...]:
        """Returns the arrays that programs of ranks hand over: x as it is, of d pieces."""

        def of(x_type: XType) -> HandOver:
            return HandOver(
                partial(on_pieces, partial(self.unpack, x_type=x_type), 0),
                partial(on_pieces, partial(self.pack, x_type=x_type), 0),
            )

        first = [ids.start for ids in layers_of_stages]
        return tuple(of(self.entering[i]) for i in (*first, -1))


def _filled(parts: list[Any], rows: int, width: int, dtype: str) -> Any:
    missing = width - sum(part.shape[1] for part in parts)
    return jnp.concatenate([*parts, jnp.zeros((rows, missing), dtype)], axis=1)


def packed_x(
    model: Model, spec: PipelineSpec, groups: dict[str, Any], rows: PyTree, key: Any
) -> PackedX | None:
    """Returns the types of x if layers of several kinds change it; None if they do not.

    `groups` are shapes, of layers those of one of each kind; `rows` are shapes of a piece of the
    batch, and `key` may be one too.
    """
    if not spec.kinds:
        return None
    key = jax.tree.map(shape_of, key)
    x_shapes: list[PyTree] = []
    makers = "the embedding", *(f"layer {i} ({k!r})" for i, k in enumerate(spec.kinds_of_layers))
    between = x_of_layers(model, spec.kinds_of_layers, groups, rows, key)
    for maker, x in zip(makers, between, strict=True):
        x_shapes.append(x)
        # Before the next layer is traced, whose own error would hide the cause.
        if _hashable(x) != _hashable(x_shapes[0]):
            _check_has_rows(x, num_rows(rows), maker)
    if len({_hashable(x) for x in x_shapes}) == 1:
        return None
    _check_has_rows(x_shapes[0], num_rows(rows), makers[0])
    entering = tuple(map(_x_type, x_shapes))
    _check_kinds(spec.kinds_of_layers, entering)
    _check_whole(spec)
    widths: dict[str, int] = {}
    for name, width in (pair for x in entering for pair in x.widths.items()):
        widths[name] = max(width, widths.get(name, 0))
    return PackedX(spec.kinds_of_layers, entering, widths)


def x_of_layers(
    model: Model, kinds: Sequence[str], groups: dict[str, Any], rows: PyTree, key: Any
) -> Iterator[PyTree]:
    """Yields the shapes of x that enters every layer, in forward order, and that of the loss.

    All arguments but the kind of every layer are shapes; "layers" has one layer of each kind.
    """
    x, behind = jax.eval_shape(model.embed, groups["embed"], rows, key), dict[Any, Any]()
    yield x
    for kind in kinds:
        asked = kind, _hashable(x)
        if asked not in behind:
            function, weights = layer_with_weights(model, kind, groups)

            def layer(*arguments: Any, function: Callable = function, x: PyTree = x) -> PyTree:
                return x_and_aux(function(*arguments), x, may_change_x=True)[0]

            behind[asked] = jax.eval_shape(layer, weights, x, rows, key)
        x = behind[asked]
        yield x


def layer_with_weights(
    model: Model, kind: str, groups: dict[str, Any]
) -> tuple[ModelFunction, PyTree]:
    """Returns the function of a kind of layers, and the parameters of one that it is given."""
    layers: Any = model.layer
    weights = groups["layers"][kind]
    return layers[kind], {"layer": weights, "shared": groups["shared"]} if model.shared else weights


def _hashable(x: PyTree) -> Any:
    return jax.tree.structure(x), tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(x))


def _x_type(x: PyTree) -> XType:
    leaves, tree = jax.tree.flatten(x)
    return XType(tree, tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves))


def _check_has_rows(x: PyTree, count: int, maker: str) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        if leaf.shape[:1] != (count,) or is_key:
            of_row = "a.shape[1:]" if leaf.shape[:1] == (1,) else "a.shape"
            raise ValueError(
                f"Layers change x, and x{jax.tree_util.keystr(path)}, which {maker} returns, is "
                f"{leaf.dtype.name}{list(leaf.shape)} in a microbatch of {count} rows. Then all "
                "leaves are arrays of numbers [rows, ...]: repeat it for every row, as by "
                f"`jnp.broadcast_to(a, (x.shape[0], *{of_row}))`, or give it as a parameter or a "
                "leaf of `batch`. A scalar that the loss alone reads is one of each row, such as "
                "a mean over all other dims."
            )


def _check_kinds(kinds: Sequence[str], entering: Sequence[XType]) -> None:
    first: dict[str, int] = {}
    for i, (kind, x) in enumerate(zip(kinds, entering, strict=False)):
        j = first.setdefault(kind, i)
        if entering[j] != x:
            raise ValueError(
                f"Layers of the kind {kind!r} are given different x: layer {j} {entering[j]}, and "
                f"layer {i} {x}. Return what the layer is given; or give these layers kinds of "
                "their own, such as `layer={'down_0': down, 'down_1': down}`."
            )


def _check_whole(spec: PipelineSpec) -> None:
    if spec.schedule is not None and language.num_slices(spec.schedule) > 1:
        raise ValueError(
            "`schedule` cuts sequences into slices, and layers return another x than they are "
            "given, which may have sequences in any dim. Give a schedule of whole microbatches, "
            "such as 1f1b."
        )


def on_packed(model: Model, packed: PackedX) -> Model:
    """Returns a model whose layers all take and return [b, K] arrays in place of x."""
    first, last = packed.entering[0], packed.entering[-1]
    pairs = zip(packed.entering, packed.entering[1:], strict=False)
    of_kind = dict(zip(packed.kinds, pairs, strict=True))

    def embed(*arguments: Any) -> dict[str, Any]:
        return packed.pack(model.embed(*arguments), first)

    def layer(function: Callable, kind: str) -> Any:
        before, after = of_kind[kind]

        def call(weights: PyTree, x: PyTree, batch: PyTree, key: Any) -> Any:
            own = packed.unpack(x, before)
            y, aux = x_and_aux(function(weights, own, batch, key), own, may_change_x=True)
            return packed.pack(y, after), aux

        return with_call(function, call)

    def loss(function: Callable) -> Any:
        def call(weights: PyTree, x: PyTree, *rest: Any) -> Any:
            return function(weights, packed.unpack(x, last), *rest)

        return with_call(function, call)

    layers: Any = model.layer
    return replace(
        model,
        embed=with_call(model.embed, embed),
        layer={kind: layer(function, kind) for kind, function in layers.items()},
        loss=loss(model.loss),
        output=model.output and loss(model.output),
        vocab_parallel_loss=model.vocab_parallel_loss and loss(model.vocab_parallel_loss),
    )
