"""Returns an optimizer for stored parameters in the form of optax."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
from jax.core import Tracer
from jaxtyping import PyTree

from ...engines import Engine, PipelineSpec
from .._model import Model
from ._optimizer import LiftedOptimizer


class Optimizer(Protocol):
    """An optimizer as those of optax are."""

    @property
    def init(self) -> Callable[[PyTree], PyTree]: ...
    @property
    def update(self) -> Callable[..., tuple[PyTree, PyTree]]: ...


class Transformation(NamedTuple):
    """An optimizer as those of optax are, for stored parameters.

    Attributes:
        init: `params -> state`, of stored parameters or their trainable part.
        update: `(grads, state, params=None, **extra) -> (updates, state)`.
    """

    init: Callable[[PyTree], PyTree]
    update: Callable[..., tuple[PyTree, PyTree]]


def transformation(
    tx: Optimizer,
    model: Model,
    engine: Engine,
    spec_of: Callable[[dict[str, Any]], PipelineSpec],
    jit: Callable[[Callable], Callable],
) -> Any:
    """Returns an optimizer for stored parameters, of the class of the user's optimizer."""
    lifted = LiftedOptimizer(tx, model, engine, spec_of)
    run_init, run_update = traced(jit, lifted.init), traced(jit, lifted.update)

    def init(params: PyTree) -> PyTree:
        leaves = jax.tree.leaves(params)
        is_shapes = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
        return (lifted.shapes if is_shapes else run_init)(params)

    def update(grads: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> Any:
        for name, value in extra.items():
            if callable(value):
                raise ValueError(
                    f"`update` is given the function `{name}`, as line searches need one. They "
                    "compute the loss inside of an update, which a pipeline cannot do: give an "
                    "optimizer of gradients alone."
                )
        return run_update(grads, state, params, extra)

    if isinstance(tx, tuple):  # of a class of optax, which may take extra arguments
        of_optax: Any = tx
        return of_optax._replace(init=init, update=update)
    return Transformation(init, update)


def traced(jit: Callable[[Callable], Callable], function: Callable) -> Callable:
    """Returns a function that is compiled where it is called outside of a compiled function."""
    compiled = jit(function)

    def run(*arguments: PyTree) -> Any:
        is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arguments))
        return (function if is_traced else compiled)(*arguments)

    return run


def state_shapes(
    tx: Optimizer, model: Model, engine: Engine, spec: PipelineSpec, params: dict[str, Any]
) -> PyTree:
    """Returns the shapes of the first state for stored parameters, with shardings."""
    return LiftedOptimizer(tx, model, engine, lambda params: spec).shapes(params)
