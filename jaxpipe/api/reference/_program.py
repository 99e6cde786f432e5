"""The user's program, on one device: embedding, every layer in order, loss, in the user's tree.

On the whole batch, or on the batch cut into pieces of consecutive rows, whose losses are combined
as `Model` says: means are averaged, of `Weighted` losses the totals and the weights are summed.
L layers, n pieces.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from ..._compat import jaxprs_in_params, translated_shardings
from .._losses import Weighted
from .._model import Model


@dataclass(frozen=True)
class Result:
    """What a program computes of a batch.

    Attributes:
        loss: The loss of the batch, a scalar.
        metrics: Scalars, and arrays [B, ...], by name.
        grads: The gradient of every trainable leaf, by its path in the user's tree.
    """

    loss: Any
    metrics: dict[str, Any]
    grads: dict[str, Any]


@dataclass(frozen=True)
class UserProgram:
    """A program of parameters and a batch, and what of its parameters is trained.

    Attributes:
        contributions: `(params, rows, piece, key) -> Contributions` of some rows of the batch.
        trainable: For every leaf of the user's tree, whether it is trained.
    """

    contributions: Callable[..., "Contributions"]
    trainable: tuple[bool, ...]

    def leaves(self, params: PyTree) -> list[Any]:
        """Returns the trainable leaves."""
        pairs = zip(jax.tree.leaves(params), self.trainable, strict=True)
        return [x for x, is_trained in pairs if is_trained]

    def names(self, params: PyTree) -> list[str]:
        """Returns the paths of the trainable leaves."""
        pairs = zip(jax.tree_util.tree_leaves_with_path(params), self.trainable, strict=True)
        return [jax.tree_util.keystr(path) for (path, _), is_trained in pairs if is_trained]

    def with_leaves(self, params: PyTree, trained: list[Any]) -> PyTree:
        """Returns the user's tree with other trainable leaves."""
        new = iter(trained)
        leaves, tree = jax.tree.flatten(params)
        pairs = zip(leaves, self.trainable, strict=True)
        return tree.unflatten([next(new) if is_trained else x for x, is_trained in pairs])

    def value_and_grad(self, params: PyTree, batch: PyTree, key: Any) -> Any:
        """Returns ((loss, metrics), gradients of the trainable leaves) of the whole batch."""

        def loss(trained: list[Any]) -> tuple[Any, dict[str, Any]]:
            contributions = self.contributions(self.with_leaves(params, trained), batch, 0, key)
            return contributions.loss, contributions.metrics

        return jax.value_and_grad(loss, has_aux=True)(self.leaves(params))

    def cut(self, num_pieces: int, params: PyTree, batch: PyTree, key: Any) -> Any:
        """Returns the same of the batch cut into n pieces, one after the other."""
        trained = self.leaves(params)
        pieces = jax.tree.map(lambda x: cut_rows(x, num_pieces), batch)

        def contribution(trained: list[Any], piece: Any) -> Contributions:
            rows, i = piece
            return self.contributions(self.with_leaves(params, trained), rows, i, key)

        def weight(piece: Any) -> Any:
            return contribution(trained, piece).weight

        numbered = pieces, jnp.arange(num_pieces)
        first = jax.tree.map(lambda x: x[0], numbered)
        is_weighted = jax.eval_shape(lambda: contribution(trained, first)).weight is not None
        # The same number as in the whole batch: a sum of weights, or the number of means.
        divisor = jnp.sum(jax.lax.map(weight, numbered)) if is_weighted else num_pieces

        def loss(trained: list[Any], piece: Any) -> tuple[Any, tuple[dict[str, Any], ...]]:
            contributions = contribution(trained, piece)
            share = contributions.total / jnp.asarray(divisor, contributions.total.dtype)
            means = {n: x / num_pieces for n, x in contributions.metrics.items() if not x.ndim}
            arrays = {n: x for n, x in contributions.metrics.items() if x.ndim}
            return share + contributions.aux / num_pieces, (means, arrays)

        def of_piece(piece: Any) -> tuple[Any, dict[str, Any]]:
            run = jax.value_and_grad(loss, has_aux=True)
            (share, (means, arrays)), grads = run(trained, piece)
            return (share, means, grads), arrays

        def step(sums: Any, piece: Any) -> tuple[Any, dict[str, Any]]:
            new, arrays = of_piece(piece)
            sums = jax.tree.map(lambda so_far, x: so_far + x.astype(so_far.dtype), sums, new)
            return sums, arrays

        shapes, _ = jax.eval_shape(of_piece, first)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype_of_sums(x.dtype)), shapes)
        (share, means, sums), arrays = jax.lax.scan(step, zeros, numbered)
        rows = {name: x.reshape(-1, *x.shape[2:]) for name, x in arrays.items()}
        grads = [total.astype(w.dtype) for total, w in zip(sums, trained, strict=True)]
        return (share, means | rows), grads


@dataclass(frozen=True)
class Contributions:
    """What some rows contribute to the loss of the batch.

    Attributes:
        total: The loss without auxiliary losses; of a `Weighted` its total.
        weight: The weight of a `Weighted`, else None.
        aux: The sum of auxiliary losses of layers.
        metrics: Scalars, and arrays with these rows, by name.
    """

    total: Any
    weight: Any
    aux: Any
    metrics: dict[str, Any]

    @property
    def loss(self) -> Any:
        """Returns the loss if these rows are the whole batch."""
        return (self.total if self.weight is None else self.total / self.weight) + self.aux


jax.tree_util.register_dataclass(Contributions)


def program_of(
    model: Model, trainable: tuple[bool, ...], pieces_per_call: int | None = None
) -> UserProgram:
    """Returns the program of a model: its functions one after the other.

    `pieces_per_call` is M if pieces run in several calls, whose numbers are folded into keys.
    """

    def pieces_of_call(piece: Any) -> tuple[Any, ...]:
        return (piece,) if pieces_per_call is None else divmod(piece, pieces_per_call)

    def contributions(params: PyTree, rows: PyTree, piece: Any, key: Any) -> Contributions:
        groups = model.to_groups(params)
        x = model.embed(groups["embed"], rows, embed_key(key, piece))
        x, sums = run_layers(model, groups, x, rows, pieces_of_call(piece), key)
        return with_loss(model, groups, x, rows, loss_key(key, piece), sums)

    return UserProgram(contributions, trainable)


_MAX_UNROLLED = 12
"""Layers of a kind that are traced one by one; more run in a scan, which compiles once."""


def run_layers(
    model: Model, groups: dict[str, Any], x: PyTree, rows: PyTree, pieces: tuple[Any, ...], key: Any
) -> tuple[PyTree, dict[str, Any]]:
    """Runs all layers on a piece; returns what leaves the last one, and sums of what is besides.

    `pieces` is the index of the microbatch, with that of its call in front if there are several.
    """
    sums: dict[str, Any] = {}
    first = 0
    for _, function, layers in runs_of_layers(model, groups):

        def step(x: PyTree, numbered: Any, function: Callable = function) -> tuple[PyTree, Any]:
            i, weights = numbered
            params = {"layer": weights, "shared": groups["shared"]} if model.shared else weights
            return x_and_aux(function(params, x, rows, layer_key(key, i, *pieces)), x)

        count = num_layers(layers)
        if count > _MAX_UNROLLED:
            if isinstance(layers, list | tuple):
                layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
            x, aux = jax.lax.scan(step, x, (first + jnp.arange(count), layers))
            layer_aux = [{name: jnp.sum(value) for name, value in aux.items()}]
        else:
            layer_aux = []
            for i in range(count):
                x, aux = step(x, (first + i, nth_layer(layers, i)))
                layer_aux.append(aux)
        for aux in layer_aux:
            sums = {name: sums.get(name, 0.0) + aux.get(name, 0.0) for name in sums | aux}
        first += count
    return x, sums


def with_loss(
    model: Model, groups: dict[str, Any], x: PyTree, rows: PyTree, key: Any, sums: dict[str, Any]
) -> Contributions:
    """Runs the loss, and adds what layers have returned besides x."""
    own = {"head": groups["head"], "embed": groups["embed"]} if model.tied else groups["head"]
    total, weight, metrics = taken_apart(model.loss(own, x, rows, key))
    aux = jnp.asarray(sums.get("loss", 0.0), total.dtype)
    metrics = metrics | {name: value for name, value in sums.items() if name != "loss"}
    return Contributions(total, weight, aux, in_sum_dtype(metrics))


def program_of_plain(plain: Callable, trainable: tuple[bool, ...]) -> UserProgram:
    """Returns the program of a function `(params, batch) -> loss` or `-> (loss, metrics)`."""

    def contributions(params: PyTree, rows: PyTree, piece: Any, key: Any) -> Contributions:
        del piece, key
        total, weight, metrics = taken_apart(plain(params, rows), "plain")
        return Contributions(total, weight, jnp.zeros_like(total), in_sum_dtype(metrics))

    return UserProgram(contributions, trainable)


def taken_apart(returned: Any, name: str = "loss") -> tuple[Any, Any, dict[str, Any]]:
    """Returns (total, weight or None, metrics) of what a loss, or the function `name`, returned."""
    match returned:
        case (loss, dict() as metrics):
            pass
        case loss:
            metrics = {}
    is_scalar = all(jnp.shape(x) == () for x in jax.tree.leaves(loss))
    if loss is None or isinstance(loss, tuple | list | dict) or not is_scalar:
        raise ValueError(
            f"`{name}` returned {jax.tree.map(jnp.shape, returned)} (shapes). Return a scalar or "
            "`jp.Weighted(total, weight)`; with a dict of metrics as `(loss, metrics)`."
        )
    if not isinstance(loss, Weighted):
        return jnp.asarray(loss, dtype_of_sums(jnp.result_type(loss))), None, metrics
    total = jnp.asarray(loss.total, dtype_of_sums(jnp.result_type(loss.total)))
    return total, jnp.asarray(loss.weight, total.dtype), metrics


def runs_of_layers(
    model: Model, groups: dict[str, Any]
) -> Iterator[tuple[str, Callable[..., Any], PyTree]]:
    """Yields (name, function, layers) in the order in which they run.

    Layers are a list, or have leaves [count, ...].
    """
    if not isinstance(model.layer, Mapping):
        yield "layer", model.layer, groups["layers"]
        return
    if model.order is None:
        for kind, function in model.layer.items():
            yield kind, function, groups["layers"][kind]
        return
    layers = {kind: iter(of_kind) for kind, of_kind in groups["layers"].items()}
    for kind in model.order:
        yield kind, model.layer[kind], [next(layers[kind])]


def num_layers(layers: PyTree) -> int:
    """Returns the number of layers of a kind."""
    if isinstance(layers, list | tuple):
        return len(layers)
    return jax.tree.leaves(layers)[0].shape[0]


def count_layers(model: Model, params: PyTree) -> int:
    """Returns L, the layers of all kinds."""
    groups = jax.eval_shape(model.to_groups, params)
    return sum(num_layers(layers) for *_, layers in runs_of_layers(model, groups))


def nth_layer(layers: PyTree, i: int) -> PyTree:
    """Returns the parameters of a layer."""
    if isinstance(layers, list | tuple):
        return layers[i]
    return jax.tree.map(lambda x: x[i], layers)


def x_and_aux(returned: Any, x: PyTree) -> tuple[PyTree, dict[str, Any]]:
    """Returns the result of a layer, which may be x alone, as (x, auxiliary scalars)."""
    if jax.tree.structure(returned) == jax.tree.structure(x):
        return returned, {}
    if isinstance(returned, tuple) and len(returned) == 2:
        y, aux = returned
        is_empty = not aux and jax.tree.structure(y) != jax.tree.structure(x)
        if isinstance(aux, Mapping | None) and not is_empty:
            return y, in_sum_dtype(dict(aux or {}))
    return returned, {}  # a layer may return another x than it is given


def embed_key(key: Any, piece: Any) -> Any:
    """Returns the dropout key of the embedding in a microbatch."""
    return _folded(key, 0, piece, 0)


def loss_key(key: Any, piece: Any) -> Any:
    """Returns the dropout key of the loss in a microbatch."""
    return _folded(key, 0, piece, 1)


def layer_key(key: Any, layer: int, *pieces: Any) -> Any:
    """Returns the dropout key of a layer in a microbatch."""
    return _folded(key, layer + 1, *pieces, 0)


def _folded(key: Any, *indices: Any) -> Any:
    if key is None:
        return ()
    for i in indices:
        key = jax.random.fold_in(key, i)
    return key


def cut_rows(x: Any, num_pieces: int) -> Any:
    """Returns [n, rows, ...] from [B, ...]."""
    return jnp.reshape(x, (num_pieces, x.shape[0] // num_pieces, *x.shape[1:]))


def dtype_of_sums(dtype: Any) -> Any:
    """Returns the dtype in which values of pieces are added up: at least float32."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.result_type(float)
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def in_sum_dtype(metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns metrics in the dtypes in which scalars are averaged."""
    return {name: jnp.asarray(x, dtype_of_sums(jnp.result_type(x))) for name, x in metrics.items()}


def on_one_device(mesh: Mesh, function: Callable, *arguments: PyTree) -> tuple[Any, Any]:
    """Runs a function on the first device; returns its results and its narrowest floating dtype.

    Sharding constraints of the function are those of a mesh with the same axes and one device.
    """
    own = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    alone = Mesh(np.array(own[:1]).reshape([1] * len(mesh.axis_names)), mesh.axis_names)
    here = jax.tree.map(partial(_moved, own[0]), arguments)

    def on_alone(sharding: NamedSharding) -> NamedSharding:
        if sharding.mesh.size == 1:
            return sharding
        return NamedSharding(alone.abstract_mesh, sharding.spec)

    with jax.set_mesh(alone), translated_shardings(on_alone):
        traced = jax.jit(function).trace(*here)
        compiled = traced.lower().compile()
        return compiled(*here), narrowest_dtype(traced.jaxpr.jaxpr)


def _moved(device: Any, x: Any) -> Any:
    """Copies an array to a device, by way of the host: its type forgets the mesh that it was on."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _moved(device, jax.random.key_data(x))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jax.device_put(np.asarray(x), device)


def narrowest_dtype(jaxpr: Jaxpr) -> Any:
    """Returns the narrowest dtype of floating-point numbers that a program computes."""
    dtypes = {x for x in _dtypes(jaxpr) if jnp.issubdtype(x, jnp.inexact)}
    return min(dtypes, key=lambda x: jnp.finfo(x).bits, default=jnp.dtype(jnp.float32))


def _dtypes(jaxpr: Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        for inner in jaxprs_in_params(equation.params):
            yield from _dtypes(inner)
        yield from (getattr(v.aval, "dtype") for v in equation.outvars if hasattr(v.aval, "dtype"))  # noqa: B009
