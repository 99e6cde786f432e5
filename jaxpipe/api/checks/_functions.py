"""Refuses what functions of a model do that an engine cannot run, or XLA not differentiate.

Prints, callbacks, gradients with respect to arrays that functions close over; convolutions and
pools over dims that XLA's partitioner divides.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
from jax.core import Tracer
from jax.extend.core import JaxprEqn
from jax.sharding import Mesh
from jaxtyping import PyTree

from ...engines import ENGINES, Engine, PipelineSpec
from ...engines.fsdp import row_axes
from ...ir.graph import all_equations, any_equation, effects_of
from ...ir.rows import source_line
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


def _is_differentiated(x: Any) -> bool:
    """Returns whether an array is traced for a gradient inside of `jax.jit`."""
    # There `shard_map` refuses it, because of the mesh in its type; elsewhere JAX differentiates.
    of_grad = type(x).__name__ in _OF_GRADIENTS
    return of_grad and isinstance(getattr(x, "primal", None), Tracer)


def check_windows(
    model: Model,
    engine: Engine,
    spec: PipelineSpec,
    weights: dict[str, Any],
    batch: PyTree,
    key: Any,
) -> None:
    """Checks that XLA computes the gradients of a model's convolutions and pools right.

    `weights` are those of `check_effects`.

    XLA's partitioner adds up the gradient of a convolution's kernel over the devices that divide
    the rows or tokens of what is convolved, and over those of all axes that divide neither: it is
    twice as large where `tensor` has two devices. That is so of groups of channels over divided
    rows, and of all convolutions over divided tokens. And it loses a part of the gradient of a
    maximum in windows that overlap, over divided tokens (jax 0.10 to 0.12, docs/dev/LOG.md).
    """
    sizes = {axis: size for axis, size in spec.mesh.shape.items() if size > 1}
    by_xla = not engine.pipelines or engine.program_per_rank or spec.whole_microbatches
    rows = row_axes(spec.mesh) if by_xla else ()
    of_layers = {*sizes} - {"stage", *row_axes(spec.mesh)}
    if not of_layers or not (rows or "context" in sizes):
        return
    x = jax.eval_shape(model.embed, weights["embed"], batch, key)
    lengths = _divided_lengths(model.sequence_dim, sizes.get("context", 1), (x, batch))

    def why_wrong(equation: JaxprEqn) -> str | None:
        params, operands = equation.params, cast(list[Any], equation.invars)
        shapes = [x.aval.shape for x in operands]
        match equation.primitive.name:
            case "conv_general_dilated":
                in_groups = params["feature_group_count"] * params["batch_group_count"] > 1
                dims: Any = params["dimension_numbers"]
                over_tokens = any(shapes[0][d] in lengths for d in dims.lhs_spec[2:])
                is_wide = any(shapes[1][d] > 1 for d in dims.rhs_spec[2:])
                unused = sorted(of_layers - {"context"} if over_tokens else of_layers)
                divided = (over_tokens and (in_groups or is_wide)) or (bool(rows) and in_groups)
                if not (unused and divided):
                    return None
                return (
                    f"a convolution, whose kernel's gradient XLA would add up over "
                    f"{', '.join(unused)} too, which divides nothing of it. Write it as a sum of "
                    "shifted products, or leave these axes out of `mesh`"
                )
            case "reduce_window_max" | "reduce_window_min":
                windows = shapes[0], params["window_dimensions"], params["window_strides"]
                if any(n in lengths and w > s for n, w, s in zip(*windows, strict=True)):
                    return (
                        "a maximum in windows that overlap, over tokens that `context` divides, of "
                        "whose gradient XLA would lose a part. Write it as a maximum of shifted "
                        "arrays, or leave `context` out of `mesh`"
                    )
        return None

    for name, function, arguments in _functions(model, weights, batch, key):
        for equation in all_equations(jax.make_jaxpr(function)(*arguments)):
            if reason := why_wrong(equation):
                raise ValueError(f"`{name}` has {reason} ({source_line(equation)}).")


def _divided_lengths(dim: int | None, num_shards: int, tree: PyTree) -> set[int]:
    """Returns the lengths of sequences that the shards divide."""
    if dim is None or num_shards == 1:
        return set()
    shapes = [leaf.shape for leaf in jax.tree.leaves(tree) if len(leaf.shape) > dim]
    return {shape[dim] for shape in shapes if not shape[dim] % num_shards}


def is_differentiated(params: PyTree) -> bool:
    """Returns whether a function of parameters is traced for a gradient by them."""
    return any(type(x).__name__ in _OF_GRADIENTS for x in jax.tree.leaves(params))


_OF_GRADIENTS = ("JVPTracer", "LinearizeTracer")


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
