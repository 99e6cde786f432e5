"""Estimates the memory of a run from shapes, without compiling anything.

The estimate is a lower bound. Activations inside a stage, logits, gathered weights and buffers of
the compiler are not counted; `compile_train_step` reports them.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ... import schedules
from ...engines import Engine, PipelinePlan
from ...models import LlamaConfig
from ...schedules import Schedule, builders, language, lock_step
from ..plan._setup import StepPlan
from ..step._state import gradient_shardings, state_shapes, state_shardings

LeafPath = tuple[Any, ...]
"""The keys of a leaf, as `jax.tree_util` gives them."""


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
    weight_plan = plan.state.weights
    shapes, where = state_shapes(plan.state), state_shardings(plan.state)
    in_float32 = jax.tree.map(_float32, shapes["weights"])
    grad_shardings = gradient_shardings(weight_plan)
    tied = getattr(weight_plan.sizes, "logits_via_embedding", False)
    is_held = _holds_all
    if weight_plan.per_stage:
        assert plan.pipeline.schedule is not None
        is_held = partial(_holds_leaf, plan.pipeline.schedule, tied)
    found = []
    for rank, stage_inputs in enumerate(_stage_input_bytes(plan)):
        weights, gradients, sums, optimizer = (
            sum(_leaf_bytes(partial(is_held, rank), tree, leaf_shardings))
            for tree, leaf_shardings in (
                (shapes["weights"], where["weights"]),
                (shapes["weights"], grad_shardings),
                (in_float32, grad_shardings),
                (shapes["optimizer"], where["optimizer"]),
            )
        )
        others = plan.batch.gradient_accumulation_steps - 1
        # Programs of ranks add gradients that are not float32 after the last loop only.
        adds_late = weight_plan.per_stage and jnp.dtype(weight_plan.dtype) != jnp.float32
        gradients, sums = (
            (sums, others * gradients) if adds_late else (gradients, min(others, 1) * sums)
        )
        weights += _copied_bytes(plan, shapes["weights"], where["weights"])
        copied = in_float32 if adds_late else shapes["weights"]
        gradients += _copied_bytes(plan, copied, grad_shardings)
        found.append(MemoryEstimate(weights, gradients, sums, optimizer, stage_inputs))
    return tuple(found)


def _float32(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jnp.float32)


def _leaf_bytes(
    is_held: Callable[[LeafPath], bool], tree: PyTree, shardings: PyTree
) -> Iterable[int]:
    """Yields the bytes of every leaf that a rank holds, on one of its devices."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), where in zip(leaves, jax.tree.leaves(shardings), strict=True):
        if is_held(path):
            yield math.prod(where.shard_shape(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize


def _copied_bytes(plan: StepPlan, tree: PyTree, shardings: PyTree) -> int:
    """Returns the bytes of stages that a rank runs and another stores, in one program of all ranks.

    In programs of ranks `_ranks_of_leaf` counts them.
    """
    schedule = plan.pipeline.schedule
    if plan.state.weights.per_stage or schedule is None:
        return 0
    stored, run = language.stored_stages(schedule)[0], language.stages_of_rank(schedule, 0)
    size = sum(_leaf_bytes(partial(_holds_all, 0), tree["stages"], shardings["stages"]))
    return size * (len(run) - len(stored)) // len(stored)


def _holds_all(rank: int, path: LeafPath) -> bool:
    """Returns True: in one program every device has a part of every leaf."""
    del rank, path
    return True


def _holds_leaf(schedule: Schedule, tied: bool, rank: int, path: LeafPath) -> bool:
    """Returns whether a rank holds a leaf of per-stage state."""
    return rank in _ranks_of_leaf(schedule, tied, path)


def _ranks_of_leaf(schedule: Schedule, tied: bool, path: LeafPath) -> set[int]:
    """Returns the ranks that hold a leaf of per-stage state during a step.

    All ranks that run a stage have its weights and gradients; its owner has the moments.
    """
    owners = language.owners(schedule)
    names = [getattr(key, "key", None) for key in path]
    is_moment = names[0] not in ("embed", "stages", "head")

    def ranks(stage: int) -> set[int]:
        return {owners[stage]} if is_moment else set(language.ranks_of_stage(schedule, stage))

    first, last = ranks(0), ranks(schedule.num_stages - 1)
    if "stages" in names:
        return ranks(path[names.index("stages") + 1].idx)
    if "head" in names:
        return last
    if "embed" in names:
        if not tied:
            return first
        # The first and the last stage read a tied embedding; the rank of the last stage adds up its
        # gradients and has its moments.
        return last if is_moment else first | last
    return set(range(schedules.num_ranks(schedule)))


def _stage_input_bytes(plan: StepPlan) -> tuple[int, ...]:
    """Returns the peak bytes of stage inputs of each rank, or one number for all."""
    batch, dtype = plan.batch, jnp.dtype(plan.model.dtype)
    shape = (batch.microbatch_size, batch.length, plan.state.weights.sizes.base_emb_dim)
    axes = ("activation_batch", "activation_length", "activation_embed")
    one = {"x": jax.ShapeDtypeStruct(shape, dtype)}
    where = batch.devices.shardings(one, {"x": axes})["x"]
    size = math.prod(where.shard_shape(shape)) * dtype.itemsize
    counts = peak_live_microbatches(plan.engine, plan.pipeline)
    carried = _carried_bytes(plan)
    return tuple(-(-count * size // plan.num_slices) + carried for count in counts)


def _carried_bytes(plan: StepPlan) -> int:
    """Returns the bytes of keys and values that slices carry, and of their cotangents."""
    batch, sizes, schedule = plan.batch, plan.state.weights.sizes, plan.pipeline.schedule
    if plan.num_slices == 1:
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


def peak_live_microbatches(engine: Engine, plan: PipelinePlan) -> tuple[int, ...]:
    """Counts the stage inputs that a rank keeps for backward passes at the same time."""
    layout = plan.layout
    if plan.schedule is not None:
        peaks = schedules.peak_activations(plan.schedule)
        return peaks if engine.program_per_rank else (max(peaks),)
    if not engine.pipelines:
        return (layout.num_layers,)
    handover = 2 if plan.forwarding_delay else 1
    # The loop keeps the stage input of every tick, also of those in a bubble.
    counts = layout.num_ranks, layout.num_repeats, plan.num_microbatches
    return (builders.circular_ticks(*counts, handover),)
