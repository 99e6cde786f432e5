"""Compares a pipeline with the user's own program, and says why it computes other numbers.

Compared are loss, metrics, gradients, and steps of an optimizer. M microbatches of b rows, which D
devices divide.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ...engines.fsdp import num_row_shards
from .._frozen import trainable_leaves
from .._params import is_stored
from ..reference import (
    Result,
    UnlikeRows,
    UserProgram,
    count_layers,
    first_function_that_mixes,
    on_one_device,
    program_of,
    program_of_plain,
)
from ._comparison import (
    CheckedStep,
    Comparison,
    compare,
    compare_leaves,
    default_tolerance,
    largest_error,
    noise,
    tolerance_of_function,
    zeros,
)
from ._compile import train_step


@dataclass(frozen=True)
class Reference:
    """What the user's program computes.

    Attributes:
        result: Loss, metrics and gradients on the host.
        dtype: The narrowest dtype that the program computes with, or the pipeline sums in.
        num_layers: L, the number of layers, of all kinds.
        text: The name of what was run.
    """

    result: Result
    dtype: Any
    num_layers: int
    text: str


def checked_step(
    pipe: Any, params: PyTree, batch: PyTree, key: Array | None, plain: Callable | None
) -> CheckedStep:
    """Returns a step that is to be compared, of parameters in the user's tree or stored ones.

    Raises:
        ValueError: If ranks of programs of their own belong to several processes.
    """
    if pipe.engine.program_per_rank and len({d.process_index for d in pipe.mesh.devices.flat}) > 1:
        raise ValueError(
            "`check` needs all parameters and gradients on one device, and the ranks belong to "
            "several processes. Call it in one process, on devices that `jp.emulate_devices` makes."
        )
    pairs = (params, pipe.unshard(params)) if is_stored(params) else (pipe.shard(params), params)
    return CheckedStep(pipe, *pairs, batch, key if pipe.takes_key else None, plain)


def check(step: CheckedStep, tolerance: float | None) -> Comparison:
    """Compares loss, metrics and gradients of a pipeline with those of the user's program.

    Returns:
        The relative error of each leaf, which prints as a table.

    Raises:
        AssertionError: If an error is larger. It says why.
        ValueError: If the user's program is given and the model has dropout.
    """
    got = run(step)  # first, as its errors say what is wrong with the model
    comparison = compared(step, got, reference_result(step), tolerance)
    require(step, comparison)
    return comparison


def compared(
    step: CheckedStep, got: Result, reference: Reference, tolerance: float | None
) -> Comparison:
    """Compares results with a reference, and says which of them are rounding."""
    comparison = _compared(got, reference, tolerance, step.plain is not None)
    if not comparison.worse or tolerance is not None:
        return comparison
    return replace(comparison, noise=_noise(step, comparison, got, reference))


def _noise(
    step: CheckedStep, found: Comparison, got: Result, reference: Reference
) -> frozenset[str]:
    """Returns the names of results that are rounding, by the user's program in float64.

    Parts that say float32, as masks of Flax do, stay so and round differently. That is enough:
    results that are no rounding agree with them within the tolerance. With dropout it draws other
    masks, so what it says is which results are zero whatever is drawn.
    """
    program, _ = _program(step)
    try:
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            wide = jax.tree.map(_in_float64, (step.whole, step.batch))
            value, dtype = on_one_device(step.pipe.mesh, program.value_and_grad, *wide, step.key)
            (loss, metrics), grads = jax.tree.map(np.asarray, value)
    except Exception:  # loops and kernels of the user may take float32 alone
        return frozenset()
    if jnp.finfo(dtype).bits < 32:
        return frozenset()
    exact = Result(loss, metrics, dict(zip(program.names(step.whole), grads, strict=True)))
    names = zeros if step.pipe.takes_key else partial(noise, tolerance=found.tolerance)
    return names(got, reference.result, exact) & set(found.worse)


def _in_float64(x: Any) -> Any:
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    x = x if is_key else np.asarray(x)
    return x.astype(np.float64) if x.dtype == np.float32 else x


def run(step: CheckedStep) -> Result:
    """Runs `value_and_grad` of a pipeline; returns numbers on the host."""
    pipe = step.pipe
    compiled = pipe.jit(lambda params, batch: pipe.value_and_grad(params, batch, step.key))
    (loss, metrics), grads = compiled(step.stored, step.batch)
    named = jax.tree_util.tree_leaves_with_path(pipe.unshard(grads))
    by_name = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in named}
    return Result(np.asarray(loss), jax.tree.map(np.asarray, metrics), by_name)


def reference_result(step: CheckedStep) -> Reference:
    """Runs the user's program, or the functions of the model, on one device.

    These run on the whole batch; with dropout on microbatches, each of which has masks of its own.
    """
    pipe, whole, (program, text) = step.pipe, step.whole, _program(step)
    function, num = program.value_and_grad, pipe.num_pieces
    if pipe.takes_key and num > 1:
        function = partial(program.cut, num)
        text = (
            f"reference: the functions of the model on {num} microbatches, each with dropout masks "
            "of its own, on one device"
        )
    value, dtype = on_one_device(pipe.mesh, function, whole, step.batch, step.key)
    (loss, metrics), grads = jax.tree.map(np.asarray, value)
    result = Result(loss, metrics, dict(zip(program.names(whole), grads, strict=True)))
    if num_row_shards(pipe.mesh) > 1:
        summed = pipe.told.options.reduce_dtype or dtype
        dtype = min(dtype, summed, key=lambda each: jnp.finfo(each).bits)
    return Reference(result, dtype, count_layers(pipe.model, whole), text)


def _program(step: CheckedStep) -> tuple[UserProgram, str]:
    pipe, plain, trainable = step.pipe, step.plain, trainable_leaves(step.pipe.frozen, step.whole)
    if plain is None:
        text = "reference: the functions of the model on the whole batch, on one device"
        per_call = pipe.num_microbatches if pipe.told.num_calls > 1 else None
        return program_of(pipe.model, trainable, per_call), text
    if pipe.takes_key:
        raise ValueError(
            "`plain` is given, and a function of the model takes a dropout key, which draws for "
            "each microbatch. Leave `plain` out, or give a model without dropout."
        )
    text = "the module's own call" if plain is pipe.model.plain else "`plain`"
    return program_of_plain(plain, trainable), f"reference: {text}, on one device"


def _compared(
    got: Result, reference: Reference, tolerance: float | None, is_plain: bool
) -> Comparison:
    expected = reference.result
    rounding, why_so = default_tolerance(reference.dtype, reference.num_layers)
    if tolerance is not None:
        why_so = f"tolerance {tolerance:g}"
    accepted = rounding if tolerance is None else tolerance
    if is_plain:
        common = set(got.metrics) & set(expected.metrics)
        got, expected = (
            replace(one, metrics={name: one.metrics[name] for name in sorted(common)})
            for one in (got, expected)
        )
    text = f"{reference.text}; {why_so}"
    return Comparison(compare(got, expected), accepted, text, rounding, reference.dtype)


def require(step: CheckedStep, found: Comparison, what: str = "The pipeline") -> None:
    """Raises an error if a result is not close enough, which says why."""
    worse = found.worse
    is_masked = step.pipe.takes_key and step.pipe.num_pieces > 1
    reason = ""
    is_coarse = jnp.finfo(found.dtype).bits < 32 and found.tolerance <= found.rounding
    if worse or is_masked or is_coarse:
        reason = why(step, found)
    if worse:
        raise AssertionError(
            f"{what} differs from the user's program in {len(worse)} of {len(found.errors)} "
            f"results: the relative error {found.errors[worse[0]]:.1e} of {worse[0]} is above the "
            f"tolerance {found.tolerance:.2g}.\n{reason}\n{found}"
        )
    if reason:
        raise AssertionError(f"{what} is not the user's program on the whole batch.\n{reason}")


def check_steps(
    step: CheckedStep, lifted: Any, optimizer: Any, steps: int, comparison: Comparison
) -> Comparison:
    """Runs steps of an optimizer on both sides, and compares the parameters after them."""
    pipe, stored, whole, batch = step.pipe, step.stored, step.whole, step.batch
    program, _ = _program(step)
    keys = (step.key,) if pipe.takes_key else ()
    is_cut = pipe.takes_key and pipe.num_pieces > 1
    gradients = partial(program.cut, pipe.num_pieces) if is_cut else program.value_and_grad

    def all_steps(whole: PyTree, batch: PyTree, key: Any) -> list[Any]:
        trained = program.leaves(whole)
        state = optimizer.init(_trained(program, whole, trained))
        for _ in range(steps):
            _, grads = gradients(program.with_leaves(whole, trained), batch, key)
            of_tree, own = (_trained(program, whole, x) for x in (grads, trained))
            with jax.numpy_dtype_promotion("standard"):  # optax multiplies integers and floats
                updates, state = optimizer.update(of_tree, state, own)
            changes = jax.tree.leaves(updates)
            trained = [(w + d).astype(w.dtype) for w, d in zip(trained, changes, strict=True)]
        return trained

    expected, _ = on_one_device(pipe.mesh, all_steps, whole, batch, step.key)
    state = lifted.init(pipe.partition(stored)[0])
    train = pipe.jit(lambda *given: train_step(pipe, lifted)(*given, *keys)[:2])
    for _ in range(steps):
        stored, state = train(stored, state, batch)
    got = program.leaves(pipe.unshard(stored))
    names = program.names(whole)
    errors = compare_leaves(
        "parameters", *(dict(zip(names, map(np.asarray, x), strict=True)) for x in (got, expected))
    )
    text = f"{comparison.reference}; parameters after {steps} steps of the optimizer"
    comparison = replace(comparison, errors=comparison.errors | errors, reference=text)
    if comparison.worse:
        raise AssertionError(
            f"After {steps} steps of the optimizer the pipeline differs from the user's program: "
            f"{comparison.worst} (relative error {comparison.largest:.1e}) is above the tolerance "
            f"{comparison.tolerance:.2g}. Gradients agree, so the optimizer computes something "
            "else of stored parameters than of the user's tree, or divides by what is zero but for "
            f"rounding.\n{comparison}"
        )
    return comparison


def _trained(program: UserProgram, whole: PyTree, leaves: list[Any]) -> PyTree:
    """Returns the user's tree with None at frozen leaves, as an optimizer is given it."""
    new = iter(leaves)
    tree = jax.tree.structure(whole)
    return tree.unflatten([next(new) if trained else None for trained in program.trainable])


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
