"""Arguments of MaxText's NNX modules: the graph and the state of a module in place of weights.

MaxText's NNX modules split `layers` and hand the parts to `run_one_iteration`. Those of Linen hand
on weights, and so do the pure functions below both. Random keys are in the loop state here, so a
state's own are handed back as they are.
"""

import inspect
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from flax import nnx

from ._stage import is_same, is_sown, overwritten_in, weights_of, with_weights


class LoopArguments(NamedTuple):
    """Arguments of `NNXPipeline.run_one_iteration` behind the loop state and the graph."""

    pipeline_weights_state: Any
    positions: Any
    segment_ids: Any
    deterministic: Any
    model_mode: Any
    logical_partition_spec: Any = None


class WindowArguments(NamedTuple):
    """Arguments of `NNXCircularPipeline.run_one_iteration` behind the window and the graph."""

    layers_metrics: Any
    current_layer_mutables: Any
    positions: Any
    segment_ids: Any
    deterministic: Any
    model_mode: Any
    logical_partition_spec: Any = None


def takes_graph(method: Callable) -> bool:
    """Returns whether an overridden method names a graph among its arguments."""
    return any("graph" in name for name in inspect.signature(method).parameters)


def split(layers: nnx.Module, weights: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the graph and the state of `layers`, with these weights in it."""
    graph, state = nnx.split(layers)
    return graph, with_weights(state, weights_of(state) | weights)


def split_state(state: Any) -> tuple[dict[str, Any], Any, Any]:
    """Returns the weights by path, the sown values and the random state of a module's state."""
    random, sown, weights = nnx.split_state(state, nnx.RngState, is_sown, ...)
    return weights_of(weights), sown, random


def check_graph(graph: Any, layers: nnx.Module) -> None:
    """Checks that a graph is that of the pipeline's stages, which run in any case."""
    if graph != nnx.graphdef(layers):
        raise ValueError(
            "`run_one_iteration` was given the graph of another module. It runs the pipeline's own "
            "stages: give the graph of `nnx.split(pipeline.layers)`."
        )


def outputs_with_state(result: Any, given: Any, name: str, params: Collection[str]) -> Any:
    """Returns the first of (outputs, state); raises if a variable but `params` was changed.

    MaxText carries the state to the next iteration, but for its parameters. The loop of methods has
    no state to carry.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"{name} returns {type(result).__name__}. As MaxText's it returns two values, the "
            "second of which is the state."
        )
    returned, before = (_arrays(state) for state in (result[1], given))
    changed = sorted({*returned} ^ {*before})
    changed += [
        path
        for path in sorted({*returned} & {*before})
        if path not in params and not is_same(returned[path], before[path])
    ]
    if changed:
        raise ValueError(
            f"{name} returns a state that differs from the one that it was given in "
            f"{', '.join(changed[:8])}. MaxText carries it to the next iteration, and here the "
            "change would be lost: return the very state, and let stages sow what they report."
        )
    return result[0]


def params_of(layers: nnx.Module) -> set[str]:
    """Returns the paths of variables that MaxText takes for parameters."""
    state = nnx.state(layers)
    return {*weights_of(nnx.state(layers, nnx.Param)), *overwritten_in(state)}


def _arrays(state: Any) -> dict[str, Any]:
    """Returns the arrays of a state, or of a dict by path, by path."""
    return dict(state) if isinstance(state, dict) else weights_of(state)
