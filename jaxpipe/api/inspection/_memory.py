"""The memory of a pipeline by arithmetic on shapes: nothing is allocated or compiled.

S ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Var
from jaxtyping import PyTree

from ...autodiff.backward import floating
from ...autodiff.staged_model import Past
from ...devices import hardware
from ...engines import PipelinePlan
from ...schedules import activation_bytes, language, lock_step

_COLUMNS = ("parameters", "gradients", "optimizer", "activations")


@dataclass(frozen=True, repr=False)
class MemoryTable:
    """Bytes on one device of every rank. Prints as a table.

    It is a lower bound: what a stage computes with, logits, gathered parameters and buffers of the
    compiler are not counted. `PipelinedModel.compile` has them.

    Attributes:
        device: The generation of the devices.
        device_bytes: The memory of a device.
        parameters: [S] bytes of parameters during a step. If the schedule has a stage on several
            ranks, all of them count.
        gradients: [S] bytes of gradients, likewise.
        optimizer: [S] bytes of the optimizer's moments, each on one rank.
        activations: [S] bytes of what forwards store for backwards, at the peak of the schedule.
    """

    device: str
    device_bytes: int
    parameters: tuple[int, ...]
    gradients: tuple[int, ...]
    optimizer: tuple[int, ...]
    activations: tuple[int, ...]

    @property
    def totals(self) -> tuple[int, ...]:
        """[S] the bytes of all of these."""
        return tuple(map(sum, zip(*(getattr(self, name) for name in _COLUMNS), strict=True)))

    @property
    def fits(self) -> bool:
        """True if every rank needs less than its device has."""
        return max(self.totals) < self.device_bytes

    def __repr__(self) -> str:
        name, unit = ("kB", 1e3) if max(self.totals) < 1e7 else ("MB", 1e6)
        lines = [f"{name} per device {''.join(f'{name:>14}' for name in _COLUMNS)}         total"]
        for rank, total in enumerate(self.totals):
            sizes = (*(getattr(self, name)[rank] for name in _COLUMNS), total)
            lines.append(f"rank {rank:<8} " + "".join(f"{size / unit:>14,.1f}" for size in sizes))
        share = max(self.totals) / self.device_bytes
        verdict = "fits" if self.fits else "does not fit"
        lines.append(
            f"{verdict}: at least {share:.1%} of the {self.device_bytes / 1e9:.1f} GB of a "
            f"{self.device}"
        )
        return "\n".join(lines)


def memory_table(
    device: str,
    parameters: Sequence[int],
    gradients: Sequence[int],
    trainable: Sequence[int],
    activations: Sequence[int],
    num_moments: int,
) -> MemoryTable:
    """Makes the table.

    Args:
        parameters: [S] bytes of parameters.
        gradients: [S] bytes of gradients.
        trainable: [S] bytes of the stored parameters that have gradients.
        activations: [S] bytes of stored activations.

    Raises:
        ValueError: If the device is unknown.
    """
    return MemoryTable(
        device,
        hardware(device).memory_bytes,
        tuple(parameters),
        tuple(gradients),
        tuple(num_moments * size for size in trainable),
        tuple(activations),
    )


def stage_residual_bytes(arguments: Callable, *given: PyTree) -> list[int]:
    """Returns the bytes that each stage stores for a microbatch, on one device.

    Returns:
        [num_stages] bytes, in forward order; those of all slices, if sequences are sliced.
    """
    sizes: list[int] = []

    def measure(*given: PyTree) -> None:
        plan, model, weights, inputs, keys = arguments(*given)
        first = jax.tree.map(lambda leaf: leaf[0, :1], inputs)  # one piece of the first microbatch
        x = model.embed(weights["embed"], first)
        stage = plan.remat(model.stage)
        stages = weights["stages"]
        slices = 1 if plan.schedule is None else language.num_slices(plan.schedule)
        if isinstance(stages, list):
            each_keys = keys if keys else [()] * len(stages)
            pairs = zip(stages, each_keys, strict=True)
            sizes.extend(slices * _residual_bytes(stage, w, x, first, keys) for w, keys in pairs)
        else:  # [v, S, ...] leaves: padded stages are alike
            w, keys = jax.tree.map(lambda leaf: leaf[0, 0], (stages, keys))
            num_stages = 1 if plan.schedule is None else plan.schedule.num_stages
            sizes.extend([slices * _residual_bytes(stage, w, x, first, keys)] * num_stages)

    jax.eval_shape(measure, *given)
    return sizes


def carried_bytes(arguments: Callable, *given: PyTree) -> int:
    """Returns the bytes of state that slices of sequences carry at the peak of the schedule."""
    sizes: list[int] = []

    def measure(*given: PyTree) -> None:
        plan, model, weights, inputs, keys = arguments(*given)
        if model.sliced_stage is None:
            return
        slots = lock_step.tick_tables(plan.ticks or lock_step.to_lock_step(plan.schedule))
        first = jax.tree.map(lambda leaf: leaf[0, :1], inputs)
        x = model.embed(weights["embed"], first)
        stages = weights["stages"]
        if isinstance(stages, list):
            pairs = list(zip(stages, keys if keys else [()] * len(stages), strict=True))
        else:  # padded stages are alike
            pairs = [jax.tree.map(lambda leaf: leaf[0, 0], (stages, keys))]
        for w, key in pairs:
            past = Past(num_slices=slots.num_slices)
            state = model.sliced_stage(w, x, first, key, past)[2].earlier
            leaves = jax.tree.leaves(floating(state))
            sums = sum(x.size * max(4, x.dtype.itemsize) for x in leaves)  # at least float32
            states = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
            counts = slots.num_slots["past"], slots.num_slots["past_cotangents"]
            sizes.append(counts[0] * states + counts[1] * sums)

    jax.eval_shape(measure, *given)
    return max(sizes, default=0)


def rank_residual_bytes(plan: PipelinePlan, sizes: Sequence[int], differ: bool) -> tuple[int, ...]:
    """Returns the bytes that each rank stores at the peak of the schedule, on one device.

    Args:
        sizes: [num_stages] bytes that a stage stores for a microbatch.

    Returns:
        [S] bytes.
    """
    if plan.schedule is None:
        return (sizes[0],) * plan.mesh.shape["stage"]
    found = activation_bytes(plan.schedule, sizes)
    return found if differ else (max(found),) * len(found)


def _residual_bytes(stage: Callable, weights: PyTree, x: PyTree, *others: PyTree) -> int:
    """Returns the bytes that the forward of a stage stores for its backward.

    Args:
        stage: `(weights, x, *others) -> (x, aux)`.
        *others: Its other arguments, or their shapes; they are not counted.
    """

    def residuals(weights: PyTree, others: PyTree, x: PyTree) -> list[Any]:
        _, pullback = jax.vjp(lambda weights, x: stage(weights, x, *others), weights, x)
        return jax.tree.leaves(pullback)

    closed = jax.make_jaxpr(residuals)(weights, others, x)
    count = len(jax.tree.leaves((weights, others)))
    skipped = {*closed.jaxpr.invars[:count], *closed.jaxpr.constvars}
    stored = {v for v in closed.jaxpr.outvars if isinstance(v, Var) and v not in skipped}
    avals: list[Any] = [v.aval for v in stored]
    return sum(aval.size * aval.dtype.itemsize for aval in avals)
