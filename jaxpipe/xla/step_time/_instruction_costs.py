"""Says what one instruction costs, on a TPU by the compiler's own estimates of cycles.

XLA:TPU writes `estimated_cycles` beside instructions. Kernels have none: they are counted by their
operations at a stated share of the device's peak: of the Pallas kernels that our models call, by
the shapes of operands.
"""

import re
from dataclasses import dataclass

from ..hlo._parse import Computation, Instruction, Module, callee
from ._kernel_work import kernel_flops
from ._rates import GpuRates, Rates
from ._roofline import roofline_seconds

MATMUL, ELEMENT_WISE, COPY = "matrix products", "element-wise", "copies"
FILL, KERNEL = "fills", "kernels"
COLLECTIVE = "collectives"
"""The kind of work of an instruction that communicates."""

KINDS_OF_WORK = (MATMUL, ELEMENT_WISE, COPY, FILL, KERNEL, COLLECTIVE)
KERNEL_EFFICIENCY = 0.5
"""The share of the peak at which kernels are assumed to multiply."""


@dataclass(frozen=True)
class InstructionCost:
    """The time of one instruction of the program text."""

    name: str
    work: str  # one of `KINDS_OF_WORK`
    opcode: str  # its opcode; of a collective its kind, such as `all-gather`
    shape: str  # the shape of its result, without layouts
    # Seconds of one execution in which it keeps the core, None if there is no estimate. A
    # collective keeps the core while that waits for it.
    seconds: float | None
    transfer_seconds: float  # seconds of one execution of a collective; 0 of other instructions
    executions: float  # how often a step executes it on a device, a mean if branches are marked
    marked: bool  # whether it is in a branch whose share of executions is known
    unmarked: bool  # whether it is in a branch whose share is unknown, which counts as always taken
    source: str  # the line of Python, as `file:line`
    op_name: str  # the place in the traced program

    @property
    def total(self) -> float:
        """Returns the seconds of a step, 0 without an estimate."""
        return (self.seconds or 0.0) * self.executions


def busy_seconds(
    rates: Rates,
    module: Module,
    computation: Computation,
    instruction: Instruction,
) -> float | None:
    """Returns the seconds for which an instruction keeps the core, or None without an estimate."""
    if isinstance(rates, GpuRates):
        return roofline_seconds(rates, module, computation, instruction)
    cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    if cycles and int(cycles[1]) < 2**62:
        return int(cycles[1]) / rates.clock_ghz / 1e9
    if instruction.opcode != "custom-call":
        return None
    flops = kernel_flops(computation, instruction)
    return None if flops is None else flops / (KERNEL_EFFICIENCY * rates.peak_tflops * 1e12)


_MOVES = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "copy", "bitcast", "reshape"),
        *("transpose", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad"),
    )
)
_FILLS = frozenset(("parameter", "constant", "tuple", "broadcast", "iota", "bitcast", "reshape"))


def kind_of_work(module: Module, instruction: Instruction) -> str:
    """Returns the kind of work that an instruction is, by what it or its fusion contains."""
    if instruction.opcode == "custom-call":
        return MATMUL if "__cublas" in instruction.attributes else KERNEL
    body = [instruction]
    if instruction.opcode == "fusion":
        body = list(module.computations[callee(instruction)].instructions.values())
    opcodes = {x.opcode for x in body if not x.shape.split("{")[0].endswith("[]")}
    if opcodes & {"convolution", "dot"}:
        return MATMUL
    if opcodes <= _FILLS and "broadcast" in opcodes:
        return FILL
    return COPY if opcodes <= _MOVES else ELEMENT_WISE
