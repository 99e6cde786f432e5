"""Refuses what functions of a model do besides computing, where an engine cannot do it.

Prints, callbacks, and gradients with respect to arrays that functions close over.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import PyTree

from ...engines import ENGINES, Engine
from ...ir.graph import any_equation, effects_of
from .._losses import loss_parts
from .._model import Model
from .._rows import layers_with_weights, weights_of_loss


def check_effects(
    model: Model, engine: Engine, mesh: Mesh, weights: dict[str, Any], batch: PyTree, key: Any
) -> None:
    """Checks that the functions of a model do nothing that the engine cannot do.

    `weights` are shapes of the groups, of layers those of one of each kind.

    In one program, ticks of the bubble run on data that is dropped, and what they print would be
    noise; JAX runs no callback where some axes of the mesh are automatic. A program for each rank
    prints.
    """
    if not engine.pipelines:
        return
    for name, function, arguments in _functions(model, weights, batch, key):
        closed = jax.make_jaxpr(function)(*arguments)
        if any(map(_is_differentiated, closed.consts)):
            raise ValueError(
                f"`{name}` closes over an array that is being differentiated, of which the engine "
                f"{engine.name!r} computes no gradient. Make it a parameter, such as one of "
                "`params['shared']` of a `Model(shared=True)`, or give `schedule=None`."
            )
        effects = effects_of(closed, prints=engine.program_per_rank)
        if effects:
            reason, others = _PROGRAM_PER_RANK if engine.program_per_rank else _ONE_PROGRAM
            raise ValueError(
                f"`{name}` calls {', '.join(effects)}, and the engine {engine.name!r} {reason}. "
                f"Return as a metric what it would show, or try it with {others}."
            )
        is_manual = {*mesh.axis_names} == {"stage"}
        calls_back = any_equation(closed, lambda e: e.primitive.name == "pure_callback")
        if not engine.program_per_rank and not is_manual and calls_back:
            raise ValueError(
                f"`{name}` calls `jax.pure_callback`, and `mesh` has the axes "
                f"{tuple(mesh.axis_names)}: JAX runs callbacks on none that are automatic. Give a "
                "mesh of the axis 'stage' alone, such as `jax.sharding.Mesh(devices, ('stage',))`, "
                f"or {_WITH_PROGRAMS}."
            )


_WITH_PROGRAMS = " or ".join(
    f"`engine={engine.name!r}`" for engine in ENGINES.values() if engine.program_per_rank
)
_ONE_PROGRAM = (
    "also runs the function on data of the bubble, which is dropped",
    f"{_WITH_PROGRAMS} or `schedule=None`",
)
_PROGRAM_PER_RANK = (
    "divides the function into a forward and a backward, which may compute parts of it again",
    "`schedule=None`",
)
"""Why an engine cannot run side effects once for each microbatch, and what can."""


def _functions(
    model: Model, weights: dict[str, Any], batch: PyTree, key: Any
) -> Iterator[tuple[str, Callable, tuple[Any, ...]]]:
    """Yields the name of every function of a model, the function, and shapes of its arguments."""
    x = jax.eval_shape(model.embed, weights["embed"], batch, key)
    yield "embed", model.embed, (weights["embed"], batch, key)
    for kind, function, params in layers_with_weights(model, weights):
        name = f"layer[{kind!r}]" if model.has_kinds else kind
        yield name, function, (params, x, batch, key)

    def loss(*arguments: Any) -> Any:
        return loss_parts(model.loss(*arguments))

    yield model.loss_name, loss, (weights_of_loss(model, weights), x, batch, key)


def _is_differentiated(x: Any) -> bool:
    """Returns whether an array is traced for a gradient inside of `jax.jit`."""
    # There `shard_map` refuses it, because of the mesh in its type; elsewhere JAX differentiates.
    of_grad = type(x).__name__ in ("JVPTracer", "LinearizeTracer")
    return of_grad and isinstance(getattr(x, "primal", None), Tracer)
