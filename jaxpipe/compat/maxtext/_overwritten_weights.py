"""Weights that a step overwrites with their gradient: the scales and histories of FP8.

The "gradient" of a scale is its next value. Several microbatches yield several values, and the
largest must be kept: a sum, as for other weights, would be wrong. So every microbatch has its own
slot, and so has every device with its own rows: slots are [M * p, ...] for p devices with their own
rows. The largest slot is selected where the slots were created. Bubble ticks yield values too,
although their outputs are discarded. A bubble tick is recognized by the cotangents of its outputs,
which are all zero.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from ...autodiff.staged_model import index_leading
from ...sharding import manual_batch_axes
from ._stages import Stage

MICROBATCH = "microbatch"
"""Key of the index of the microbatch in `batch_inputs`."""


def split_weights(weights: dict[str, Any], names: tuple[str, ...]) -> tuple[dict, dict]:
    """Returns the weights that are not overwritten, and those that are."""
    overwritten = {name: weights[name] for name in names if name in weights}
    return {name: w for name, w in weights.items() if name not in overwritten}, overwritten


def slotted_weights(plain: PyTree, slots: PyTree) -> dict[str, PyTree]:
    """Returns the weights of a stage made by `stage_with_slots`: ordinary weights and slots."""
    return {"others": plain, "slots": slots}


def broadcast_to_slots(overwritten: PyTree, num_slots: int) -> PyTree:
    """Broadcasts [R, S, ...] weights to slots [R, S, M * p, ...], whose largest is kept."""
    return jax.tree.map(lambda w: _broadcast_to_slots(w, num_slots), overwritten)


def stage_with_slots(stage: Stage) -> Stage:
    """Returns `stage` for weights of `slotted_weights`, whose slots are [M * p, ...]."""

    def run(weights, x, batch_inputs, rng):
        own, tag = _enter(index_leading(weights["slots"], _slot(batch_inputs[MICROBATCH])))
        y, records = stage(weights["others"] | own, x, batch_inputs, rng)
        return _leave(y, tag), records

    return run


def _slot(microbatch: jax.Array) -> jax.Array:
    """Returns the index of this device's slot for `microbatch` [1], sharded as rows are."""
    axes = manual_batch_axes()
    if not axes:
        return microbatch[0]
    return microbatch[0] * lax.axis_size(axes) + lax.axis_index(axes)


def _slots_of(w: jax.Array, num_slots: int) -> jax.Array:
    shape = (*w.shape[:2], num_slots, *w.shape[2:])
    return jnp.broadcast_to(jnp.expand_dims(w, 2), shape)


def _largest(num_slots: int, w: jax.Array, slots: jax.Array) -> tuple[jax.Array]:
    del num_slots
    # FP8 scales and histories are never negative, and a slot that was not set is zero.
    largest = jnp.max(slots, axis=2)
    was_set = jnp.any(slots != 0, axis=tuple(range(2, slots.ndim)))
    return (jnp.where(was_set.reshape(*was_set.shape, *[1] * (w.ndim - 2)), largest, w),)


_broadcast_to_slots: Callable = jax.custom_vjp(_slots_of, nondiff_argnums=(1,))
_broadcast_to_slots.defvjp(lambda w, num: (_slots_of(w, num), w), _largest)


def _with_tag(own: PyTree) -> tuple[PyTree, jax.Array]:
    # The tag is computed from the weights so that it varies over ranks as its cotangent does.
    return own, jnp.sum(0 * jax.tree.leaves(own)[0])


def _drop_grads_of_bubble(_: None, cotangents: tuple[PyTree, jax.Array]) -> tuple[PyTree]:
    own, tag = cotangents
    return (jax.tree.map(lambda w: jnp.where(tag != 0, w, jnp.zeros_like(w)), own),)


_enter: Callable = jax.custom_vjp(_with_tag)
_enter.defvjp(lambda own: (_with_tag(own), None), _drop_grads_of_bubble)


def _first(y: PyTree, tag: jax.Array) -> PyTree:
    del tag
    return y


def _mark_bubble(tag: PyTree, y: PyTree) -> tuple[PyTree, jax.Array]:
    floats = [x for x in jax.tree.leaves(y) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return y, jnp.stack([jnp.any(x != 0) for x in floats]).any().astype(tag.dtype)


_leave: Callable = jax.custom_vjp(_first)
_leave.defvjp(lambda y, tag: (y, jnp.zeros_like(tag)), _mark_bubble)
