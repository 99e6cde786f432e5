"""Wraps a stage that a factory makes in NNX as a Linen module."""

from collections.abc import Collection
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from ....spmd.ranks import at_init
from ..nnx import Factory, check_unchanged, one_stage, weights_of, without_sown


def as_linen(factory: Factory) -> nn.Module:
    """Returns the module that `factory` makes, with boxes around variables that name their dims."""

    def make(*, rngs: nnx.Rngs) -> nnx.Module:
        # At `init`, as Linen's `make_rng` does. At `apply`, `ToLinen` adds the stream "default".
        if "default" not in rngs and "params" in rngs:
            setattr(rngs, "default", rngs.params)  # noqa: B010
        return one_stage(factory, rngs)

    return nnx.bridge.ToLinen(make, metadata_fn=_boxed, parent=None)


def _boxed(variable: nnx.Variable) -> Any:
    names, value = variable.get_metadata().get("out_sharding"), variable.get_value()
    return value if names is None else nn.LogicallyPartitioned(value, tuple(names))


def check_call(factory: Factory, streams: Collection[str], arrays: Any, *options: Any) -> None:
    """Checks that a call of the stage changes no variable and draws from these streams alone.

    `ToLinen` would drop changes, and would draw from the key 0 what is to come from other streams:
    the same numbers for all stages and microbatches.
    """
    others = set()

    def call(*arrays: Any) -> None:
        stage: Any = one_stage(factory, nnx.Rngs(0, **dict.fromkeys(streams, 0)))
        counts, variables = _counts(stage), _variables(stage)
        stage(*arrays, *options)
        drawn = {tag for tag, count in _counts(stage) if not any(count is c for _, c in counts)}
        others.update(drawn.difference(streams))
        check_unchanged(variables, _variables(stage))

    jax.eval_shape(at_init(call), *arrays)
    if others:
        raise ValueError(
            f"A stage draws random numbers, and `apply` has no `rngs` to draw them from: it was "
            f"given {', '.join(sorted(streams)) or 'none'}. Give all streams, such as "
            '`rngs={"dropout": key}`, or `deterministic=True`.'
        )


def _counts(module: nnx.Module) -> list[tuple[str, Any]]:
    """Returns the stream and the count of everything that draws."""
    state = nnx.to_flat_state(nnx.state(module, nnx.RngCount))
    return [(count.tag, count.get_value()) for _, count in state]


def _variables(module: nnx.Module) -> dict[str, Any]:
    return weights_of(nnx.state(without_sown(module), nnx.Not(nnx.RngState)))
