"""Tabulates the memory of a step on a device: by arithmetic of shapes, and as compiled."""

from dataclasses import dataclass

from ..plan.compile_report import Memory
from ..train.estimate._memory_estimate import estimate_memory
from ..train.plan._setup import Setup


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
    """A row of the table.

    Attributes:
        name: The name of the arrays.
        sizes: [columns] their bytes on a device.
        shares: [columns] their share of the largest column's sum, 0 to 1.
    """

    name: str
    sizes: list[int]
    shares: list[float]


@dataclass(frozen=True)
class StepMemory:
    """The memory of a step on every kind of device.

    Attributes:
        columns: The names of the columns, one per kind of device.
        parts: The rows.
        totals: [columns] sums of bytes.
    """

    columns: list[str]
    parts: list[MemoryRow]
    totals: list[int]


_NAMES = {
    "weights": "Weights",
    "gradients": "Gradients",
    "gradient_sums": "Sums of gradients",
    "optimizer": "Optimizer state",
    "stage_inputs": "Stage inputs kept",
}


def memory_table(setup: Setup) -> StepMemory:
    """Computes the memory of a step from shapes.

    Args:
        setup: The plan of a run.

    Returns:
        A table with one column, or one for each rank if they differ.
    """
    found = estimate_memory(setup)
    totals = [each.total for each in found]
    largest = max(totals)
    parts = []
    for attribute, name in _NAMES.items():
        sizes = [getattr(each, attribute) for each in found]
        if any(sizes):
            parts.append(MemoryRow(name, sizes, [size / largest for size in sizes]))
    alike = len(found) == 1
    columns = ["Every device"] if alike else [f"Rank {rank}" for rank in range(len(found))]
    return StepMemory(columns, parts, totals)


def remarks(setup: Setup) -> list[str]:
    """Returns sentences about memory that the arithmetic leaves out.

    Args:
        setup: The plan of a run.

    Returns:
        Sentences for the page.
    """
    config = setup.config
    found = [
        "By arithmetic of shapes: the least a step needs. What runs inside a stage, logits, "
        "gathered weights and the compiler's buffers come on top."
    ]
    if config.remat_policy != "full" or not _wraps_ticks(setup):
        found.append(
            f"With remat_policy {config.remat_policy} a stage keeps more than its input, which is "
            "not counted."
        )
    if config.pipeline_fsdp_ag_once or config.pipeline_fsdp_ag_per_repeat:
        found.append(
            "Weights and gradients that are whole while they are gathered are not counted."
        )
    if setup.per_stage_state:
        found.append("A device of each rank; what programs leave for each other is not counted.")
    return found


def _wraps_ticks(setup: Setup) -> bool:
    config = setup.config
    return config.set_remat_policy_on_pipeline_iterations or not config.engine.pipelines
