"""A layer of the model as a module of Linen or NNX, whose parameters are those of the layer.

Its call has MaxText's arguments. Everything else that the layer reads, and the dropout key, are in
`inputs`, a dict; and auxiliary losses and metrics are sown, as users of Flax do it.
"""

from collections.abc import Callable
from functools import partial, reduce
from operator import getitem
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from jaxtyping import PyTree

from ... import models
from ...models.weights import is_weight

METRICS_COLLECTION = "metrics"
"""The collection that Linen layers sow their auxiliary losses and metrics into."""


class LinenLayer(nn.Module):
    """A decoder layer in Linen.

    Attributes:
        weights: Its abstract weights, a tree of `models.Weight`.
        run: The function that it computes.
    """

    weights: Any
    run: Callable

    @nn.compact
    def __call__(self, inputs, segment_ids, positions, deterministic, model_mode):
        weights = {
            name: self.param(name, partial(_init_boxed, part))
            for name, part in self.weights.items()
        }
        y, aux = _run(self.run, weights, inputs, segment_ids, positions)
        for name, value in aux.items():
            self.sow(METRICS_COLLECTION, name, value)
        return y


def _init_boxed(part: PyTree, key: jax.Array) -> PyTree:
    return jax.tree.map(
        lambda w, x: nn.LogicallyPartitioned(x, w.axes),
        part,
        models.initialize(part, key),
        is_leaf=is_weight,
    )


class NnxLayer(nnx.Module):
    """A decoder layer in NNX; its arguments are the attributes of `LinenLayer`."""

    def __init__(self, weights: Any, run: Callable, rngs: nnx.Rngs):
        arrays = models.initialize(weights, rngs.params())
        self.weights = nnx.data(
            jax.tree.map(
                lambda w, x: nnx.Param(x, out_sharding=w.axes), weights, arrays, is_leaf=is_weight
            )
        )
        self.run = run

    def __call__(self, inputs, segment_ids, positions, deterministic, model_mode):
        weights = nnx.to_pure_dict(nnx.state(self, nnx.Param))["weights"]
        y, aux = _run(self.run, weights, inputs, segment_ids, positions)
        for name, value in aux.items():
            self.sow(nnx.Intermediate, name, value)
        return y


def _run(run: Callable, weights: PyTree, inputs: PyTree, segment_ids: Any, positions: Any) -> Any:
    batch = inputs["batch"] | {"segment_ids": segment_ids, "positions": positions}
    return run(weights, inputs["x"], batch, inputs["key"])


def flax_layer(run: Callable, weights: PyTree, *, is_nnx: bool) -> Callable:
    """Returns a layer like `run` that calls a module of Flax, whose parameters are `weights`."""
    call = _nnx_call(run, weights) if is_nnx else _linen_call(run, weights)

    def layer(weights: PyTree, x: PyTree, batch: Any, key: Any) -> Any:
        inputs = {"x": x, "batch": batch, "key": key}
        is_deterministic = isinstance(key, tuple)
        arguments = batch["segment_ids"], batch["positions"], is_deterministic, "train"
        return call(weights, inputs, *arguments)

    return layer


def _linen_call(run: Callable, weights: PyTree) -> Callable:
    module = LinenLayer(weights, run)

    def call(weights: PyTree, *arguments: Any) -> Any:
        variables = {"params": weights}
        returned: Any = module.apply(variables, *arguments, mutable=[METRICS_COLLECTION])
        y, sown = returned
        return y, {name: value for name, (value,) in sown.get(METRICS_COLLECTION, {}).items()}

    return call


def _nnx_call(run: Callable, weights: PyTree) -> Callable:
    with nnx.use_eager_sharding(False):
        graph, state = jax.eval_shape(lambda: nnx.split(NnxLayer(weights, run, nnx.Rngs(0))))

    def call(weights: PyTree, *arguments: Any) -> Any:
        flat = [
            (path, v.replace(reduce(getitem, path[1:], weights)))
            for path, v in nnx.to_flat_state(state)
        ]
        with nnx.use_eager_sharding(False):
            module = nnx.merge(graph, nnx.from_flat_state(flat), copy=True)
        y, sown = nnx.capture(module, nnx.Intermediate)(*arguments)
        flat_sown = nnx.to_flat_state(sown)
        return y, {str(path[-1]): values.get_value()[0] for path, values in flat_sown}

    return call
