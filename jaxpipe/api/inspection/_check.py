"""Compares a pipeline with the user's own program: loss, metrics, gradients, steps of an optimizer.

M microbatches.
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
    UserProgram,
    count_layers,
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
    noise,
    zeros,
)
from ._compile import train_step
from ._why import why


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
