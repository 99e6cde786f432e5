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


def check(
    pipe: Any,
    params: PyTree,
    batch: PyTree,
    key: Array | None,
    *,
    plain: Callable | None = None,
    tolerance: float | None = None,
) -> Comparison:
    """Compares loss, metrics and gradients of a pipeline with those of the user's program.

    Args:
        batch: A tree of [B, ...] leaves, where B is a multiple of A * M.

    Returns:
        The relative error of each leaf, which prints as a table.

    Raises:
        AssertionError: If an error is larger. It says why.
        ValueError: If `plain` is given and the model has dropout, or ranks of programs of their own
            belong to several processes.
    """
    if pipe.engine.program_per_rank and len({d.process_index for d in pipe.mesh.devices.flat}) > 1:
        raise ValueError(
            "`check` needs all parameters and gradients on one device, and the ranks belong to "
            "several processes. Call it in one process, on devices that `jp.emulate_devices` makes."
        )
    stored, whole = stored_and_whole(pipe, params)
    got = run(pipe, stored, batch, key)  # first, as its errors say what is wrong with the model
    reference = reference_result(pipe, whole, batch, key, plain=plain)
    comparison = compared(pipe, got, reference, whole, batch, key, tolerance, plain=plain)
    require(pipe, comparison, whole, batch, key, plain=plain)
    return comparison


def compared(
    pipe: Any,
    got: Result,
    reference: Reference,
    whole: PyTree,
    batch: PyTree,
    key: Array | None,
    tolerance: float | None,
    *,
    plain: Callable | None = None,
) -> Comparison:
    """Compares results with a reference, and says which of them are rounding."""
    comparison = _compared(got, reference, tolerance, plain is not None)
    if not comparison.worse or tolerance is not None:
        return comparison
    names = _noise(pipe, comparison, got, reference, whole, batch, key, plain)
    return replace(comparison, noise=names)


def _noise(
    pipe: Any,
    found: Comparison,
    got: Result,
    reference: Reference,
    whole: PyTree,
    batch: PyTree,
    key: Array | None,
    plain: Callable | None,
) -> frozenset[str]:
    """Returns the names of results that are rounding, by the user's program in float64.

    Parts that say float32, as masks of Flax do, stay so and round differently. That is enough:
    results that are no rounding agree with them within the tolerance. With dropout it draws other
    masks, so what it says is which results are zero whatever is drawn.
    """
    program, _ = _program(pipe, whole, plain)
    key = key if pipe.takes_key else None
    try:
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            wide = jax.tree.map(_in_float64, (whole, batch))
            value, dtype = on_one_device(pipe.mesh, program.value_and_grad, *wide, key)
            (loss, metrics), grads = jax.tree.map(np.asarray, value)
    except Exception:  # loops and kernels of the user may take float32 alone
        return frozenset()
    if jnp.finfo(dtype).bits < 32:
        return frozenset()
    exact = Result(loss, metrics, dict(zip(program.names(whole), grads, strict=True)))
    names = zeros if pipe.takes_key else partial(noise, tolerance=found.tolerance)
    return names(got, reference.result, exact) & set(found.worse)


def _in_float64(x: Any) -> Any:
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    x = x if is_key else np.asarray(x)
    return x.astype(np.float64) if x.dtype == np.float32 else x


def stored_and_whole(pipe: Any, params: PyTree) -> tuple[Any, PyTree]:
    """Returns parameters as the pipeline stores them, and in the user's tree."""
    return (params, pipe.unshard(params)) if is_stored(params) else (pipe.shard(params), params)


def run(pipe: Any, stored: Any, batch: PyTree, key: Array | None) -> Result:
    """Runs `value_and_grad` of a pipeline; returns numbers on the host."""
    step = pipe.jit(lambda params, batch: pipe.value_and_grad(params, batch, key))
    (loss, metrics), grads = step(stored, batch)
    named = jax.tree_util.tree_leaves_with_path(pipe.unshard(grads))
    by_name = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in named}
    return Result(np.asarray(loss), jax.tree.map(np.asarray, metrics), by_name)


def reference_result(
    pipe: Any, whole: PyTree, batch: PyTree, key: Array | None, *, plain: Callable | None = None
) -> Reference:
    """Runs the user's program, or the functions of the model, on one device.

    These run on the whole batch; with dropout on microbatches, each of which has masks of its own.
    """
    program, text = _program(pipe, whole, plain)
    function, num = program.value_and_grad, pipe.num_pieces
    if pipe.takes_key and num > 1:
        function = partial(program.cut, num)
        text = (
            f"reference: the functions of the model on {num} microbatches, each with dropout masks "
            "of its own, on one device"
        )
    key = key if pipe.takes_key else None
    value, dtype = on_one_device(pipe.mesh, function, whole, batch, key)
    (loss, metrics), grads = jax.tree.map(np.asarray, value)
    result = Result(loss, metrics, dict(zip(program.names(whole), grads, strict=True)))
    if num_row_shards(pipe.mesh) > 1:
        summed = pipe.told.options.reduce_dtype or dtype
        dtype = min(dtype, summed, key=lambda each: jnp.finfo(each).bits)
    return Reference(result, dtype, count_layers(pipe.model, whole), text)


def _program(pipe: Any, whole: PyTree, plain: Callable | None) -> tuple[UserProgram, str]:
    trainable = trainable_leaves(pipe.frozen, whole)
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


def require(
    pipe: Any,
    found: Comparison,
    whole: PyTree,
    batch: PyTree,
    key: Array | None,
    *,
    plain: Callable | None = None,
    what: str = "The pipeline",
) -> None:
    """Raises an error if a result is not close enough, which says why."""
    worse = found.worse
    is_masked = pipe.takes_key and pipe.num_pieces > 1
    reason = ""
    is_coarse = jnp.finfo(found.dtype).bits < 32 and found.tolerance <= found.rounding
    if worse or is_masked or is_coarse:
        reason = why(pipe, found, whole, batch, key, plain)
    if worse:
        raise AssertionError(
            f"{what} differs from the user's program in {len(worse)} of {len(found.errors)} "
            f"results: the relative error {found.errors[worse[0]]:.1e} of {worse[0]} is above the "
            f"tolerance {found.tolerance:.2g}.\n{reason}\n{found}"
        )
    if reason:
        raise AssertionError(f"{what} is not the user's program on the whole batch.\n{reason}")


def check_steps(
    pipe: Any,
    lifted: Any,
    optimizer: Any,
    steps: int,
    params: PyTree,
    batch: PyTree,
    key: Array | None,
    comparison: Comparison,
    *,
    plain: Callable | None = None,
) -> Comparison:
    """Runs steps of an optimizer on both sides, and compares the parameters after them."""
    stored, whole = stored_and_whole(pipe, params)
    program, _ = _program(pipe, whole, plain)
    keys = (key,) if pipe.takes_key else ()
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

    key_or_none = key if pipe.takes_key else None
    expected, _ = on_one_device(pipe.mesh, all_steps, whole, batch, key_or_none)
    state = lifted.init(pipe.partition(stored)[0])
    step = pipe.jit(lambda *given: train_step(pipe, lifted)(*given, *keys)[:2])
    for _ in range(steps):
        stored, state = step(stored, state, batch)
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
