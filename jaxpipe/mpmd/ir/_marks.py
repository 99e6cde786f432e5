"""Defines marks that cut a function into stages: they compute nothing, but appear in its jaxpr.

Transposing a mark makes a mark in the backward, on the cotangents of the marked values: the values
that leave a stage in the forward are the values whose cotangents its backward begins with.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

T = TypeVar("T")

STAGE_END = "stage_end"
stage_end_p = Primitive(STAGE_END)
stage_end_p.multiple_results = True

_MARK_IDS = count()
"""Counts marks. A mark and its transpose have the same number, as they belong to one stage."""


_IS_TRACING = ContextVar("is_tracing", default=False)


def is_tracing() -> bool:
    """Returns whether a function is being traced that is compiled to a program for each group."""
    return _IS_TRACING.get()


@contextmanager
def tracing() -> Iterator[None]:
    """Makes `is_tracing` true."""
    token = _IS_TRACING.set(True)
    try:
        yield
    finally:
        _IS_TRACING.reset(token)


def mark_stage_end(anchor: T, name: str | None = None) -> T:
    """Marks the end of a stage and the arrays that it hands to the next stage. Computes nothing.

    Marks may be used anywhere outside loops, also inside `jax.jit`, `jax.checkpoint` and Flax
    modules. Stages are numbered in the order in which the program reaches their marks. A mark after
    the last stage, before the loss, is optional.

    Args:
        anchor: A pytree of arrays of any shapes: all arrays that leave the stage.
        name: A label of the stage for the reader of the code. It has no effect.

    Returns:
        `anchor`. Continue with this value, not with the argument.

    Example:
        >>> float(mark_stage_end(2.0))
        2.0
    """
    del name
    return _mark(anchor, None)


def mark_part(anchor: T, part: int) -> T:
    """Marks arrays of a part of a stage: what the part reads of others, or others read of it.

    The cotangents of these arrays belong to the backward of the same part.
    """
    return _mark(anchor, part)


def _mark(anchor: T, part: int | None) -> T:
    leaves, tree = jax.tree.flatten(anchor)
    if not leaves:
        return anchor
    mark_id = next(_MARK_IDS)
    marked = stage_end_p.bind(*leaves, backward=False, mark_id=mark_id, part=part, order=0)
    return tree.unflatten(marked)


def pipeline_enter_stage(anchor: T, name: str | None = None) -> T:
    """Marks the end of a stage: JaxPP's older name of `mark_stage_end`.

    Args:
        anchor: A pytree of arrays of any shapes: all arrays that leave the stage.
        name: A label of the stage for the reader of the code. It has no effect.

    Returns:
        `anchor`. Continue with this value, not with the argument.
    """
    return mark_stage_end(anchor, name)


def _jvp(primals: Any, tangents: Any, *, order: int, **params: Any) -> tuple[list[Any], list[Any]]:
    """Marks the tangents too. `order` counts the derivatives by which a mark was made."""
    out = stage_end_p.bind(*primals, order=order, **params)
    with_tangent = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
    values = [tangents[i] for i in with_tangent]
    marked = stage_end_p.bind(*values, order=order + 1, **params) if values else []
    by_position = dict(zip(with_tangent, marked, strict=True))
    return out, [by_position.get(i, t) for i, t in enumerate(tangents)]


def _transpose(
    cotangents: Any,
    *arguments: Any,
    backward: bool,
    mark_id: int,
    part: int | None,
    order: int,
) -> list[Any]:
    del arguments
    nonzero = [i for i, t in enumerate(cotangents) if not isinstance(t, ad.Zero)]
    if not nonzero:
        return list(cotangents)
    if part is not None:  # JAX's scan cannot transpose zeros of some of its stacked results
        cotangents, nonzero = list(map(ad.instantiate_zeros, cotangents)), range(len(cotangents))
    params = {"backward": not backward, "mark_id": mark_id, "part": part, "order": order}
    marked = stage_end_p.bind(*(cotangents[i] for i in nonzero), **params)
    by_position = dict(zip(nonzero, marked, strict=True))
    return [by_position.get(i, t) for i, t in enumerate(cotangents)]


def _batch(arguments: Any, dims: Any, **params: Any) -> tuple[list[Any], Any]:
    return stage_end_p.bind(*arguments, **params), dims


def identity(*arguments: Any, **params: Any) -> list[Any]:
    """Returns the arguments of a mark unchanged."""
    del params
    return list(arguments)


stage_end_p.def_impl(identity)
stage_end_p.def_abstract_eval(identity)
mlir.register_lowering(stage_end_p, mlir.lower_fun(identity, multiple_results=True))
ad.primitive_jvps[stage_end_p] = _jvp
ad.primitive_transposes[stage_end_p] = _transpose
batching.primitive_batchers[stage_end_p] = _batch
