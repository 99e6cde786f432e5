"""The circular loop made of a module's methods, which its call runs if one of them is overridden.

Otherwise the call runs `spmd.circular`: the same functions of `spmd/circular_engine/_shape.py`,
seen by one rank, with a backward of their own. The methods see whole arrays, and JAX derives the
backward. The results are equal; memory is not: JAX stores the buffers between iterations, and the
gathered weights of every repeat or, without remat of iterations, of every iteration.

S ranks, R repeats, M microbatches.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ...spmd.circular_engine import LoopPhase, run_repeats, run_ticks
from ...spmd.stepwise import LoopState
from ._methods import LoopMethods, PipelineMethods, WindowMethods
from ._stages import ActivationInFlight, to_stored


class _Batch(NamedTuple):
    """Arguments of `run_one_iteration` behind the loop state and the weights."""

    positions: PyTree
    segment_ids: PyTree
    deterministic: Any
    model_mode: Any


def _methods_of(kind: type) -> dict[str, Any]:
    own = {name: f for name, f in vars(kind).items() if not name.startswith("_")}
    return {name: f for name, f in own.items() if inspect.isroutine(f)}


_METHODS = {kind: _methods_of(kind) for kind in (PipelineMethods, LoopMethods, WindowMethods)}
"""The documented methods by the class that defines them, as they were defined."""


def overridden_methods(pipeline: PipelineMethods) -> tuple[str, ...]:
    """Returns the names of the documented methods that a subclass or an assignment replaces."""
    kind = LoopMethods if isinstance(pipeline, LoopMethods) else WindowMethods
    methods = _METHODS[PipelineMethods] | _METHODS[kind]
    return tuple(
        name
        for name, method in methods.items()
        if name in vars(pipeline) or inspect.getattr_static(type(pipeline), name) is not method
    )


def check_methods_can_run(
    pipeline: PipelineMethods, overridden: tuple[str, ...], slots: PyTree
) -> None:
    """Checks that the loop of methods can run the pipeline."""
    batch_axes = pipeline.settings.batch_axes
    if batch_axes:
        raise ValueError(
            f"`{'`, `'.join(overridden)}` is overridden and `pipeline_batch_axes` is {batch_axes}. "
            "Methods see the rows of whole microbatches, not those of one device: give ()."
        )
    if slots:
        raise ValueError(
            f"`{'`, `'.join(overridden)}` is overridden, and a step overwrites the weights "
            f"{[*slots]} with their gradient. The loop of methods would add up these gradients: "
            "remove the override, or quantization."
        )


def loop_of_methods(
    pipeline: Any, state: LoopState, names: PyTree, options: tuple[Any, Any]
) -> Callable:
    """Returns an engine, as `spmd.circular`, that calls the methods; it ignores stage and keys."""
    has_window = isinstance(pipeline, WindowMethods)

    def engine(stage, weights, inputs, batch_inputs, keys):
        del stage, keys
        weights = to_stored(weights, pipeline.settings)
        batch = _Batch(batch_inputs["positions"], batch_inputs["segment_ids"], *options)
        start = {name: x for name, x in state.items() if name != "bsw"}
        if isinstance(inputs, ActivationInFlight):
            start = _with_records(start, inputs)
        if has_window:
            done = _run_windows(pipeline, start, weights, names, batch)
            outputs = pipeline.realign_output_microbatches(done["state_io"])
        else:
            done = _run_iterations(pipeline, start, weights, names, batch)
            outputs = pipeline.permute_output_micro_per_stage_dim(done["state_io"])
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs), {}

    return engine


def _run_iterations(
    pipeline: LoopMethods, state: LoopState, weights: PyTree, names: PyTree, batch: _Batch
) -> LoopState:
    """Runs all iterations of a pipeline that looks up weights in every iteration."""
    gather = pipeline.settings.gather
    if gather == "once":
        weights = pipeline.all_gather_over_fsdp(weights, names)
    names = names if gather == "tick" and pipeline.mesh is not None else None

    def iterate(state, weights):
        return pipeline.run_one_iteration(state, weights, *batch, None, names)

    iterate = _remat(pipeline)(iterate)
    return run_ticks(
        lambda state, _: iterate(state, weights),
        state,
        LoopPhase(0, _num_iterations(pipeline)),
        scan=pipeline.settings.scan_ticks,
    )


def _run_windows(
    pipeline: WindowMethods, state: LoopState, weights: PyTree, names: PyTree, batch: _Batch
) -> LoopState:
    """Runs all iterations of a pipeline that prefetches the weights of each repeat."""
    settings, M = pipeline.settings, pipeline.settings.pipeline_shape.num_microbatches
    specs = pipeline.specs_without_repeats(names)

    def iterate(state, window):
        return pipeline.run_one_iteration(state, window, *batch, None)

    iterate = _remat(pipeline)(iterate)

    def block(state, repeat, length=M):
        window = pipeline.weight_prefetching(weights, specs, repeat * M - 1)
        phase = LoopPhase(repeat * M, length)
        return run_ticks(lambda s, _: iterate(s, window), state, phase, scan=settings.scan_ticks)

    blocks, rest = divmod(_num_iterations(pipeline), M)
    state = run_repeats(block, state, range(blocks), scan=settings.scan_repeats)
    return block(state, blocks, rest) if rest else state


def _num_iterations(pipeline: PipelineMethods) -> int:
    shape = pipeline.settings.pipeline_shape
    bubble = pipeline.iterations_to_complete_first_microbatch_one_repeat()
    return shape.num_repeats * shape.num_microbatches + bubble


def _remat(pipeline: PipelineMethods) -> Callable[[Callable], Callable]:
    """Returns the wrapper of an iteration, `jax.checkpoint` if the config wraps iterations."""
    settings = pipeline.settings
    if not settings.remat_iterations:
        return lambda f: f
    policy = pipeline.get_pipeline_remat_policy()
    return lambda f: jax.checkpoint(f, policy=policy, prevent_cse=not settings.scan_ticks)


def _with_records(state: LoopState, inputs: ActivationInFlight) -> LoopState:
    """Returns the loop state for activations that carry what stages record, nothing so far."""

    def in_flight(buffer: PyTree, num_dims: int) -> PyTree:
        if buffer is None:
            return None
        lead = jax.tree.leaves(buffer)[0].shape[:num_dims]
        rest = inputs.records, inputs.stage
        empty = jax.tree.map(lambda r: jnp.zeros((*lead, *r.shape[1:]), r.dtype), rest)
        return ActivationInFlight(buffer, *empty)

    dims = {"state_io": 2, "shift": 1, "prev_outputs": 1, "circ_storage": 2}
    dims |= {"circ_storage_mover": 1}
    return state | {name: in_flight(state[name], dims[name]) for name in dims}
