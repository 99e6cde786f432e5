"""Tabulates the memory of a step on a device: by arithmetic of shapes, and as compiled."""

from dataclasses import dataclass, fields

from ..engines import PeakMemory
from ..train.estimate import estimate_memory
from ..train.plan import StepPlan
from ..xla.compile_report import Memory


@dataclass(frozen=True)
class CompiledMemory:
    """A step that was compiled for the report.

    Attributes:
        memory: Its memory per device.
        platform: The kind of devices it was compiled for, such as `TPU v5`.
    """

    memory: Memory
    platform: str


@dataclass(frozen=True)
class MemoryRow:
    """A row of the table."""

    name: str  # the name of the arrays
    sizes: list[int]  # [columns] their bytes on a device
    shares: list[float]  # [columns] their share of the largest column's sum, 0 to 1


@dataclass(frozen=True)
class StepMemory:
    """The memory of a step on every kind of device."""

    columns: list[str]  # the names of the columns, one per kind of device
    parts: list[MemoryRow]  # the rows of the table
    totals: list[int]  # [columns] sums of bytes


def memory_table(plan: StepPlan) -> StepMemory:
    """Computes the memory of a step from shapes."""
    estimates = estimate_memory(plan)
    totals = [round(each.total) for each in estimates]
    largest = max(totals)
    parts = []
    for kind in fields(PeakMemory):
        sizes = [round(getattr(each, kind.name)) for each in estimates]
        if any(sizes):
            shares = [size / largest for size in sizes]
            parts.append(MemoryRow(kind.name.capitalize(), sizes, shares))
    alike = len(estimates) == 1
    columns = ["Every device"] if alike else [f"Rank {rank}" for rank in range(len(estimates))]
    return StepMemory(columns, parts, totals)


def remarks(plan: StepPlan) -> list[str]:
    """Returns sentences about what the arithmetic leaves out."""
    notes = ["By arithmetic of shapes, as `jaxpipe plan` predicts it: compilers differ by some 5%."]
    if plan.engine.program_per_rank:
        notes.append("A device of each rank; what programs leave for each other is not counted.")
    return notes
