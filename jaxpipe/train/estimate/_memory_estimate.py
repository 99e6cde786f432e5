"""Estimates the memory of a run from shapes, without compiling anything.

The estimate is a lower bound. Activations inside a stage, logits, gathered weights and buffers of
the compiler are not counted; `compile_train_step` reports them.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ...models import LlamaConfig
from ...schedules import lock_step
from ..plan._setup import StepPlan
from ..step._state import of_gradients, state_shapes
from ..step._step import stored_shardings


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on a device.

    Attributes:
        weights: The weights as they are stored between steps, and those that a rank is sent in a
            step, of stages that it runs and another rank stores.
        gradients: The gradients of all these weights, as the optimizer takes them; with `mpmd`
            their float32 sums over microbatches.
        gradient_sums: Gradients beside those of the current call of the engine, if a step has
            several calls: their float32 sum, or with `mpmd` and weights that are not float32 those
            of every other call.
        optimizer: Its state.
        stage_inputs: The stage inputs of all microbatches that wait for their backward at the same
            time; with slices of sequences also the keys and values that these carry.
    """

    weights: int
    gradients: int
    gradient_sums: int
    optimizer: int
    stage_inputs: int

    @property
    def total(self) -> int:
        gradients = self.gradients + self.gradient_sums
        return self.weights + gradients + self.optimizer + self.stage_inputs


def estimate_memory(plan: StepPlan) -> tuple[MemoryEstimate, ...]:
    """Estimates the memory that a run keeps on a device.

    Returns:
        One estimate for each rank of the `mpmd` engine; a single one for the other engines, whose
        devices are alike.
    """
    engine, weight_plan = plan.engine, plan.state.weights
    weights = plan.groups
    in_float32 = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), weights)
    num_later_calls = plan.batch.gradient_accumulation_steps - 1
    # Programs of ranks add gradients that are not float32 after the last loop only.
    adds_late = weight_plan.per_stage and jnp.dtype(weight_plan.dtype) != jnp.float32
    columns = zip(
        engine.step_bytes(plan.pipeline, weights, weight_plan.tied),
        engine.step_bytes(of_gradients(plan), weights, weight_plan.tied),
        engine.step_bytes(of_gradients(plan), in_float32, weight_plan.tied),
        _optimizer_bytes(plan),
        _stage_input_bytes(plan),
        strict=True,
    )
    estimates = []
    for stored, gradients, sums, optimizer, stage_inputs in columns:
        later = num_later_calls * gradients if adds_late else min(num_later_calls, 1) * sums
        kept = (sums if adds_late else gradients), later
        estimates.append(MemoryEstimate(stored, *kept, optimizer, stage_inputs))
    return tuple(estimates if engine.program_per_rank else estimates[:1])


def _optimizer_bytes(plan: StepPlan) -> list[int]:
    """Returns the bytes of the optimizer's state on a device of every rank."""
    shapes, shardings = state_shapes(plan.state)["optimizer"], stored_shardings(plan)["optimizer"]
    sizes = [0] * plan.pipe.mesh.shape["stage"]
    for leaf, where in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True):
        for rank in getattr(where, "mpmd_idxs", range(len(sizes))):
            here = where.of_rank(rank) if plan.engine.program_per_rank else where
            sizes[rank] += math.prod(here.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return sizes


def _stage_input_bytes(plan: StepPlan) -> tuple[int, ...]:
    """Returns the peak bytes of stage inputs of each rank, or one number for all."""
    batch, dtype = plan.batch, jnp.dtype(plan.model.dtype)
    shape = (batch.microbatch_size, batch.length, plan.state.weights.sizes.base_emb_dim)
    axes = ("activation_batch", "activation_length", "activation_embed")
    one = {"x": jax.ShapeDtypeStruct(shape, dtype)}
    where = batch.devices.shardings(one, {"x": axes})["x"]
    size = math.prod(where.shard_shape(shape)) * dtype.itemsize
    counts = plan.engine.kept_inputs(plan.pipeline)
    carried = _carried_bytes(plan)
    return tuple(-(-count * size // plan.pipe.num_slices) + carried for count in counts)


def _carried_bytes(plan: StepPlan) -> int:
    """Returns the bytes of keys and values that slices carry, and of their cotangents."""
    batch, sizes, schedule = plan.batch, plan.state.weights.sizes, plan.pipeline.schedule
    if plan.pipe.num_slices == 1:
        return 0
    assert isinstance(sizes, LlamaConfig) and schedule is not None
    shape = batch.microbatch_size, batch.length, sizes.base_num_kv_heads, sizes.head_dim
    axes = ("activation_batch", "activation_length", "activation_kv_heads", "activation_kv")
    one = {"keys": jax.ShapeDtypeStruct(shape, jnp.dtype(plan.model.dtype))}
    where = batch.devices.shardings(one, {"keys": axes})["keys"]
    size, itemsize = math.prod(where.shard_shape(shape)), one["keys"].dtype.itemsize
    ticks = plan.pipeline.ticks or lock_step.to_lock_step(schedule)
    slots = lock_step.tick_tables(ticks).num_slots
    sums = slots["past_cotangents"] * max(4, itemsize)  # at least float32
    of_layer = 2 * size * (slots["past"] * itemsize + sums)
    return plan.pipeline.layout.layers_per_stage * of_layer
