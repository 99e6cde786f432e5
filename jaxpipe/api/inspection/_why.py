"""Says why a pipeline computes other numbers than the user's program, and what to write.

M microbatches of b rows, which D devices divide.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...engines.fsdp import num_row_shards
from .._frozen import trainable_leaves
from ..reference import (
    Result,
    UnlikeRows,
    first_function_that_mixes,
    on_one_device,
    program_of,
    program_of_plain,
)
from ._comparison import CheckedStep, Comparison, compare, largest_error, tolerance_of_function


def why(step: CheckedStep, found: Comparison) -> str:
    """Returns sentences that name the cause of a difference and what to write; "" for none.

    The user's program is run again: cut into M microbatches, and cut into the rows of devices. And
    every function is run on all rows and on pieces of them.
    """
    if step.plain is not None and found.worse:
        text = _plain_is_another(step, step.plain, found)
        if text:
            return text
    pipe, batch = step.pipe, step.batch
    tolerance = tolerance_of_function(found.dtype)
    num, rows = pipe.num_pieces, jnp.shape(jax.tree.leaves(batch)[0])[0]
    of_model = partial(first_function_that_mixes, pipe.mesh, pipe.model, step.whole)
    if num > 1:
        unlike = of_model(batch, step.key, num, tolerance)
        if unlike is not None:
            return _of_microbatches(unlike, num, rows // num)
    if not found.worse:
        return ""
    if all(error <= found.rounding for error in found.errors.values()):
        return (
            "No function mixes rows, and the differences are those of rounding: give a `tolerance` "
            f"of {found.rounding:.2g}."
        )
    shards = num_row_shards(pipe.mesh)
    if shards > 1:
        first = jax.tree.map(lambda x: x[: rows // num], batch)
        unlike = of_model(first, step.key, shards, tolerance)
        if unlike is not None and _sees_rows_of_device(pipe, unlike):
            return _of_row_shards(unlike, shards, rows // num)
    if pipe.num_slices > 1:
        return (
            f"The schedule cuts sequences into {pipe.num_slices} slices: `embed`, `loss` and all "
            "of `layer` but what it reads of `past` must treat each token by itself. Targets are "
            "leaves of the batch, not tokens that `loss` shifts, and positions are too."
        )
    if jnp.finfo(found.dtype).bits < 32:
        return (
            "No function mixes rows by more than 16 bits show. Rounding may exceed the "
            "tolerance: check with parameters and batch in float32, which shows what the pipeline "
            "does, or give `tolerance`."
        )
    return (
        "No function mixes rows in its forward. A gradient of its own (`jax.custom_vjp`) may; if "
        "there is none, this is an error of the pipeline: please report it."
    )


def _plain_is_another(step: CheckedStep, plain: Callable, found: Comparison) -> str:
    """Says that `plain` is not what the functions of the model compute, if so."""
    pipe, whole = step.pipe, step.whole
    trainable, results = trainable_leaves(pipe.frozen, whole), []
    for program in (program_of(pipe.model, trainable), program_of_plain(plain, trainable)):
        value, _ = on_one_device(pipe.mesh, program.value_and_grad, whole, step.batch, None)
        (loss, _), grads = jax.tree.map(np.asarray, value)
        results.append(Result(loss, {}, dict(zip(program.names(whole), grads, strict=True))))
    errors = compare(results[0], results[1])
    name = largest_error(errors)
    if errors[name] <= max(found.tolerance, found.rounding):
        return ""
    of_module = "The module's own call is another program than the functions that it was cut into"
    of_user = "`plain` is another program than the functions of the model"
    return (
        f"{of_module if plain is pipe.model.plain else of_user}, on the whole batch: its loss "
        f"is {float(results[1].loss):.6g}, and that of `embed`, every layer and `loss` one after "
        f"the other {float(results[0].loss):.6g}; {name} has the relative error "
        f"{errors[name]:.1e}."
    )


def _of_microbatches(unlike: UnlikeRows, num: int, rows: int) -> str:
    """Says what a function does that is another thing in a microbatch than in the batch."""
    where = unlike.where
    if unlike.whole is None:
        name = "x" if unlike.result == "x" else f"entry of the metric {unlike.result}"
        return (
            f"{where} mixes rows: in the whole batch a row becomes another {name} than in a "
            f"microbatch (relative error {unlike.error:.1e}), as with batch statistics, positions "
            "by `jnp.arange(rows)`, or a table with an entry for every row. The pipeline gives it "
            f"{num} microbatches of {rows} rows. Let it treat each row by itself, and put what a "
            "row needs (its position, its entry of the table) into `batch` as a leaf [rows, ...]. "
            f"If it is meant to see {rows} rows, compare with a function `plain` that calls it so."
        )
    is_loss = unlike.result == "loss"
    name = "The loss" if is_loss else f"The metric {unlike.result} of {where}"
    start = (
        f"{name} is no mean over rows: it is {unlike.whole:.6g} for the whole batch, and the mean "
        f"of {num} microbatches is {unlike.pieces:.6g}. "
    )
    if unlike.is_sum:
        advice = "It is a sum over rows: return the mean, with `jnp.mean` in place of `jnp.sum`."
        if is_loss:
            advice += (
                " Or let `jp.Weighted(total, weight)` say what it is to be divided by, such as "
                "`jp.Weighted(jnp.sum(loss), jnp.sum(mask))`."
            )
        return start + advice
    if unlike.is_root:
        return (
            f"{start}It is the root of a mean: return the mean, and take the root of what the "
            "pipeline returns."
        )
    if not is_loss:
        return f"{start}Metrics are averaged over microbatches: return a mean over rows."
    return (
        f"{start}For a masked mean return `jp.Weighted(jnp.sum(loss * mask), jnp.sum(mask))` in "
        "place of the quotient. A root, a logarithm or a quotient of means belongs outside of "
        "`loss`. A loss that compares rows, such as a contrastive one, sees the rows of one "
        f"microbatch: give fewer `microbatches`, or, if {rows} rows are what you want, compare "
        "with a function `plain` that cuts the batch so."
    )


def _sees_rows_of_device(pipe: Any, unlike: UnlikeRows) -> bool:
    """Returns whether a function is given the rows of a device, as the last trace decided."""
    functions = pipe.last_rows[0].functions
    return any(f.is_row_wise for f in functions if f.name == unlike.function)


def _of_row_shards(unlike: UnlikeRows, shards: int, rows: int) -> str:
    """Says what a function does that is another thing on the rows of a device."""
    return (
        f"{unlike.where} mixes rows of a microbatch (relative error {unlike.error:.1e} in "
        f"{unlike.result}), and the pipeline gives it the {rows // shards} of {rows} rows that a "
        f"device has, as if it treated rows one by one. Say that it does not: "
        f"`jp.pipeline(..., row_wise={{{unlike.function!r}: False}})`."
    )
