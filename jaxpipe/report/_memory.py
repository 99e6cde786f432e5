"""What a step keeps on a device: by arithmetic of shapes, and as compiled if it was."""

from dataclasses import dataclass

from ..plan import Memory
from ..train import Setup, footprints


@dataclass(frozen=True)
class Compiled:
    """A step that was compiled for the report.

    Attributes:
        memory: Per device.
        platform: The devices it was compiled for, such as `TPU v5`.
    """

    memory: Memory
    platform: str


@dataclass(frozen=True)
class Part:
    """A row of the table.

    Attributes:
        name: What is kept.
        sizes: [columns] bytes on a device.
        shares: [columns] of the largest column's sum, 0 to 1.
    """

    name: str
    sizes: list[int]
    shares: list[float]


@dataclass(frozen=True)
class Table:
    """The memory of devices.

    Attributes:
        columns: Which devices.
        parts: What they keep.
        totals: [columns] bytes.
    """

    columns: list[str]
    parts: list[Part]
    totals: list[int]


_NAMES = {
    "weights": "Weights",
    "gradients": "Gradients",
    "gradient_sums": "Sums of gradients",
    "optimizer": "Optimizer state",
    "stage_inputs": "Stage inputs kept",
}


def kept(setup: Setup) -> Table:
    """The table: a column for each rank where they differ."""
    found = footprints(setup)
    totals = [each.total for each in found]
    largest = max(totals)
    parts = []
    for attribute, name in _NAMES.items():
        sizes = [getattr(each, attribute) for each in found]
        if any(sizes):
            parts.append(Part(name, sizes, [size / largest for size in sizes]))
    alike = len(found) == 1
    columns = ["Every device"] if alike else [f"Rank {rank}" for rank in range(len(found))]
    return Table(columns, parts, totals)


def remarks(setup: Setup) -> list[str]:
    """What the arithmetic leaves out in this run."""
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
    return config.set_remat_policy_on_pipeline_iterations or config.pipeline_engine == "none"
