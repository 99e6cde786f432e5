"""Gradient accumulation: several calls of an engine in one step, whose gradients are summed.

A calls, M microbatches in each.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from ..autodiff import StagedModel
from ..autodiff.staged_model import accum_dtype, fold_in_microbatch, merge_leading, split_metrics
from ._engine import Engine, PipelineSpec
from ._memory import Buffers, PeakMemory, StepCounts, StepSizes
from .fsdp import over_data

Calls = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
"""`(weights, batch_inputs, keys) -> (sums over microbatches, arrays [M, ...])`."""


def _gradient_accumulation(f: Calls, num_steps: int, reshard: Callable[[PyTree], PyTree]) -> Calls:
    """Calls `f` on M microbatches at a time in a `lax.scan`, and sums its results.

    Every call has its own dropout masks, and `reshard` shards the sums after it.
    """

    def run(weights: PyTree, batch_inputs: PyTree, keys: PyTree) -> tuple[PyTree, PyTree]:
        def call(sums: PyTree, call_inputs: PyTree) -> tuple[PyTree, PyTree]:
            index, part = call_inputs
            results, arrays = f(weights, part, fold_in_microbatch(keys, index))
            sums = jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, results)
            return reshard(sums), arrays

        def cut(x: jax.Array) -> jax.Array:  # by sizes: of an array of size 0, -1 may be any
            return x.reshape(num_steps, x.shape[0] // num_steps, *x.shape[1:])

        parts = jax.tree.map(cut, batch_inputs)
        first = jax.tree.map(lambda x: x[0], parts)
        shapes, _ = jax.eval_shape(f, weights, first, keys)
        zeros = reshard(jax.tree.map(lambda x: jnp.zeros(x.shape, accum_dtype(x.dtype)), shapes))
        sums, arrays = lax.scan(call, zeros, (jnp.arange(num_steps), parts))
        sums = jax.tree.map(lambda x, result: x.astype(result.dtype), sums, shapes)
        return sums, merge_leading(arrays)

    return run


def _unrolled_gradient_accumulation(f: Calls, num_steps: int) -> Calls:
    """Calls `f` A times, one call after the other without a loop, and sums its results.

    This is for MPMD, whose programs have no loops but those over microbatches.
    """

    def run(weights: PyTree, batch_inputs: PyTree, keys: PyTree) -> tuple[PyTree, PyTree]:
        size = jax.tree.leaves(batch_inputs)[0].shape[0] // num_steps
        parts = (
            jax.tree.map(lambda x: x[call * size : (call + 1) * size], batch_inputs)  # noqa: B023
            for call in range(num_steps)
        )
        results = [
            f(weights, part, fold_in_microbatch(keys, call)) for call, part in enumerate(parts)
        ]
        sums, arrays = zip(*results, strict=True)
        arrays = jax.tree.map(lambda *of_calls: jnp.concatenate(of_calls), *arrays)
        return jax.tree.map(sum_in_float32, *sums), arrays

    def sum_in_float32(*terms: jax.Array) -> jax.Array:
        first, *others = (x.astype(accum_dtype(x)) for x in terms)
        return sum(others, start=first).astype(terms[0].dtype)

    return run


def with_calls(engine: Engine) -> Engine:
    """Returns an engine that runs M microbatches A times, if its spec says so, and sums results."""

    def of_calls(run: Callable, *, has_grads: bool) -> Callable:
        def run_calls(
            spec: PipelineSpec, model: StagedModel, weights: PyTree, inputs: PyTree, keys: PyTree
        ) -> Any:
            if spec.num_calls == 1:
                return run(spec, model, weights, inputs, keys)

            def call(weights: PyTree, inputs: PyTree, keys: PyTree) -> tuple[PyTree, PyTree]:
                result = run(spec, model, weights, inputs, keys)
                (loss, metrics), grads = result if has_grads else (result, {})
                scalars, arrays = split_metrics(metrics)
                return ((loss, scalars), grads), arrays

            def as_stored(sums: PyTree) -> PyTree:
                if not has_grads:
                    return sums
                value, grads = sums
                divided = over_data(spec, grads)
                return value, engine.storage.put_like(divided, grads, grads, model.tied)

            if engine.storage.per_stage:
                calls = _unrolled_gradient_accumulation(call, spec.num_calls)
            else:
                calls = _gradient_accumulation(call, spec.num_calls, as_stored)
            ((loss, scalars), grads), arrays = calls(weights, inputs, keys)
            value = loss, scalars | arrays
            return (value, grads) if has_grads else value

        return run_calls

    def memory(counts: StepCounts, buffers: Buffers, sizes: StepSizes) -> PeakMemory:
        peak, sums = engine.memory(counts, buffers, sizes), sizes.grad_sums
        others = counts.num_calls - 1
        # Programs of ranks add gradients that are not float32 after the last loop only.
        adds_late = engine.storage.per_stage and sizes.call_grads < sums
        earlier = others * sizes.call_grads if adds_late else min(others, 1) * sums
        return replace(peak, gradients=peak.gradients + earlier)

    return replace(
        engine,
        value=of_calls(engine.value, has_grads=False),
        value_and_grad=of_calls(engine.value_and_grad, has_grads=True),
        memory=memory,
    )
