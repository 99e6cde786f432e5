"""The train step compiled without a state or a batch, also for devices that are not here."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ._setup import Setup, batch_shardings
from ._step import State, make_train_step, state_shapes, state_shardings


def compile_train_step(setup: Setup) -> jax.stages.Compiled:
    """Lowers and compiles the step that `train` runs. Nothing is computed."""
    # Made outside of the mesh: a number that is computed on the way needs a device that is here.
    step: Any = make_train_step(setup)
    arguments = abstract_state(setup), abstract_batch(setup)
    with jax.set_mesh(setup.mesh):
        return step.lower(*arguments).compile()


def abstract_state(setup: Setup) -> State:
    """`jax.ShapeDtypeStruct` with a sharding for every leaf of a state."""
    return jax.tree.map(_placed, state_shapes(setup), state_shardings(setup))


def abstract_batch(setup: Setup) -> PyTree:
    """`jax.ShapeDtypeStruct` with a sharding for every array [M, b, T] of a batch."""
    shape = (setup.num_microbatches, setup.microbatch_size, setup.config.max_target_length)
    return {
        name: jax.ShapeDtypeStruct(
            shape, jnp.float32 if name == "target_weights" else jnp.int32, sharding=where
        )
        for name, where in batch_shardings(setup).items()
    }


def _placed(leaf: jax.ShapeDtypeStruct, where: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
