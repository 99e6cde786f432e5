"""A stage that a factory makes in NNX, as a Linen module."""

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from ....spmd.ranks import at_init

Factory = Callable[[nnx.Rngs], nnx.Module]


def as_linen(factory: Factory) -> nn.Module:
    """Returns the module that `factory` makes, with boxes around variables that name their dims."""

    def make(*, rngs: nnx.Rngs) -> nnx.Module:
        if "default" not in rngs and "params" in rngs:  # what Linen's `make_rng` falls back to
            setattr(rngs, "default", rngs.params)  # noqa: B010
        return _make(factory, rngs)

    return nnx.bridge.ToLinen(make, metadata_fn=_boxed, parent=None)


def _make(factory: Factory, rngs: nnx.Rngs) -> nnx.Module:
    with nnx.use_eager_sharding(False):  # only stacked variables are sharded
        return factory(rngs)


def _boxed(variable: nnx.Variable) -> Any:
    names, value = variable.get_metadata().get("out_sharding"), variable.get_value()
    return value if names is None else nn.LogicallyPartitioned(value, tuple(names))


def check_draws_nothing(factory: Factory, arrays: Any, *options: Any) -> None:
    """Raises a `ValueError` if the stage draws random numbers when it is called.

    `ToLinen` would draw them from the key 0, the same for all stages and microbatches.
    """
    drawn = []

    def call(*arrays: Any) -> None:
        stage: Any = _make(factory, nnx.Rngs(0))
        before = _counts(stage)
        stage(*arrays, *options)
        drawn.extend(name for name, count in _counts(stage).items() if count is not before[name])

    jax.eval_shape(at_init(call), *arrays)
    if drawn:
        raise ValueError(
            f"A stage draws random numbers ({', '.join(sorted(drawn))}), and `apply` has no `rngs` "
            'to draw them from. Give it `rngs={"dropout": key}`, or `deterministic=True`.'
        )


def _counts(module: nnx.Module) -> dict[str, Any]:
    state = nnx.to_flat_state(nnx.state(module, nnx.RngCount))
    return {".".join(map(str, path)): variable.get_value() for path, variable in state}
