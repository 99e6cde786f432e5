"""The circular loop made of a module's methods, which its call runs if one of them is overridden.

Otherwise the call runs `spmd.circular`: the same functions of `spmd/circular_engine/_shape.py`,
seen by one rank, with a backward of their own. The methods see whole arrays, and JAX derives the
backward. The results are equal; memory is not: JAX stores the buffers between iterations, and the
gathered weights of every repeat or, without remat of iterations, of every iteration.

S ranks, R repeats, M microbatches.
"""

import inspect
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ...spmd import stepwise
from ...spmd.circular_engine import LoopPhase, run_repeats, run_ticks
from ...spmd.stepwise import LoopState
from ._methods import LoopMethods, MethodBatch, PipelineAttributes, PipelineMethods, WindowMethods
from ._stages import ActivationInFlight, from_stored, to_stored

_PRIVATE = {
    "_maybe_shard_with_logical",
    "_maybe_shard_with_name",
    "_remove_fsdp_from_physical_partition_spec",
    "_remove_logically_partition",
    "_setup_pipeline_attributes",
    "_stamp_at_current_trace",
}
"""Methods of MaxText's modules for their own use, which modules here do not have."""
_ATTRIBUTES = [name for name in vars(PipelineAttributes) if not name.startswith("_")]
"""The documented attributes, all of which follow from the config and the mesh."""


def _methods_of(kind: type) -> set[str]:
    return {x for x, f in vars(kind).items() if not x.startswith("_") and inspect.isroutine(f)}


_SHARED, _LOOP, _WINDOW = map(_methods_of, (PipelineMethods, LoopMethods, WindowMethods))
_UNCALLED = {
    LoopMethods: (_WINDOW - _LOOP - _SHARED) | _PRIVATE,
    WindowMethods: (_LOOP - _WINDOW - _SHARED) | _PRIVATE | {"all_gather_over_fsdp"},
}
"""Methods of MaxText's that the call of a pipeline never calls, there or here."""
Kind = TypeVar("Kind", bound=type)
_ORIGINALS: dict[type, dict[str, Any]] = {}
"""Methods and attributes of the modules, as they were defined."""


def record_originals(module: Kind) -> Kind:
    """Records the methods of a pipeline module, by which replaced ones are found."""
    names = {*_SHARED, *_LOOP, *_WINDOW, *_ATTRIBUTES}
    _ORIGINALS[module] = {x: inspect.getattr_static(module, x, None) for x in names}
    return module


def _replaced(pipeline: PipelineMethods, names: Collection[str]) -> tuple[str, ...]:
    """Returns the names that a subclass or an assignment replaces."""
    kind = type(pipeline)
    originals = next(_ORIGINALS[base] for base in kind.__mro__ if base in _ORIGINALS)
    return tuple(
        name
        for name in sorted(names)
        if name in vars(pipeline)
        or inspect.getattr_static(kind, name, None) is not originals.get(name)
    )


def overridden_methods(pipeline: PipelineMethods) -> tuple[str, ...]:
    """Returns the names of the documented methods that a subclass or an assignment replaces."""
    kind = LoopMethods if isinstance(pipeline, LoopMethods) else WindowMethods
    name = type(pipeline).__name__
    called = _SHARED | (_LOOP if kind is LoopMethods else _WINDOW)
    called -= _UNCALLED[kind]
    if uncalled := _replaced(pipeline, _UNCALLED[kind]):
        raise ValueError(
            f"`{'`, `'.join(uncalled)}` is defined in `{name}`, which no call of a "
            f"{'circular pipeline' if kind is WindowMethods else 'pipeline'} uses. Those that it "
            f"uses are `{'`, `'.join(sorted(called))}`."
        )
    if fixed := _replaced(pipeline, _ATTRIBUTES):
        raise ValueError(
            f"`{'`, `'.join(fixed)}` is replaced in `{name}`, which the call does not read: it "
            "follows from the config and the mesh. Change these."
        )
    return _replaced(pipeline, called)


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
        batch = MethodBatch(batch_inputs["positions"], batch_inputs["segment_ids"], *options)
        start = {name: x for name, x in state.items() if name != "bsw"}
        if isinstance(inputs, ActivationInFlight):
            start = _with_records(start, inputs)
        if has_window:
            done = _run_windows(pipeline, start, weights, names, batch)
        else:
            done = _run_iterations(pipeline, start, weights, names, batch)
        outputs = pipeline.realign_output_microbatches(done["state_io"])
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs), {}

    return engine


def _run_iterations(
    pipeline: LoopMethods, state: LoopState, weights: PyTree, names: PyTree, batch: MethodBatch
) -> LoopState:
    """Runs all iterations of a pipeline that looks up weights in every iteration."""
    gather = pipeline.settings.gather
    if gather == "once":
        weights = pipeline.all_gather_over_fsdp(weights, names)
    names = names if gather == "tick" and pipeline.mesh is not None else None

    def iterate(state, weights):
        return pipeline.iterate(state, weights, batch, names)

    iterate = _remat(pipeline)(iterate)
    return run_ticks(
        lambda state, _: iterate(state, weights),
        state,
        LoopPhase(0, _num_iterations(pipeline)),
        scan=pipeline.settings.scan_ticks,
    )


def _run_windows(
    pipeline: WindowMethods, state: LoopState, weights: PyTree, names: PyTree, batch: MethodBatch
) -> LoopState:
    """Runs all iterations of a pipeline that prefetches the weights of each repeat."""
    settings, M = pipeline.settings, pipeline.settings.pipeline_shape.num_microbatches
    specs = pipeline.specs_without_repeats(names)
    empty = jax.eval_shape(lambda w: stepwise.empty_window(from_stored(w, settings)), weights)

    def iterate(state, window):
        return pipeline.iterate(state, window, batch)

    iterate = _remat(pipeline)(iterate)

    def block(state, repeat, length=M):
        window = pipeline.weight_prefetching(weights, specs, repeat * M - 1)
        _check_window(window, empty)
        phase = LoopPhase(repeat * M, length)
        return run_ticks(lambda s, _: iterate(s, window), state, phase, scan=settings.scan_ticks)

    blocks, rest = divmod(_num_iterations(pipeline), M)
    state = run_repeats(block, state, range(blocks), scan=settings.scan_repeats)
    return block(state, blocks, rest) if rest else state


def _check_window(window: PyTree, empty: PyTree) -> None:
    """Checks that an overridden `weight_prefetching` returns both halves of the window."""
    returned, expected = ([x.shape for x in jax.tree.leaves(tree)] for tree in (window, empty))
    if returned != expected:
        raise ValueError(
            f"`weight_prefetching` returns arrays of the shapes {returned}, and a window has "
            f"{expected}: the weights of the last repeat and of the next one, [2, ranks, ...]. "
            "MaxText's returns the next repeat's alone. Call `super().weight_prefetching`."
        )


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
