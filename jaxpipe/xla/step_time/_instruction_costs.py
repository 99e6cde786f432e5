"""Lists what each instruction of a step costs on a TPU, by the compiler's own estimates of cycles.

XLA:TPU writes `estimated_cycles` beside instructions. Kernels have none: they are counted by their
operations at a stated share of the device's peak. Collectives have none either: they count for the
time in which nothing overlaps with them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..hlo._collectives import Collective, starting_collective
from ..hlo._overlap import instructions_between
from ..hlo._parse import (
    Computation,
    Instruction,
    Module,
    callee,
    op_name,
    parse_hlo,
    without_layouts,
)
from ..hlo._sources import Sources, read_sources
from ..hlo._trips import Scope
from ..hlo._walk import CallContext, walk, walk_instruction
from ._kernels import kernel_flops
from ._rates import DeviceRates, transfer_seconds

MATMUL, ELEMENT_WISE, COPY = "matrix products", "element-wise", "copies"
FILL, KERNEL = "fills", "kernels"
COLLECTIVE = "collectives"
"""The kind of work of an instruction that communicates."""

KINDS_OF_WORK = (MATMUL, ELEMENT_WISE, COPY, FILL, KERNEL, COLLECTIVE)
KERNEL_EFFICIENCY = 0.5
"""The share of the peak at which kernels are assumed to multiply."""


@dataclass(frozen=True)
class InstructionCost:
    """The time of one instruction of the program text.

    Attributes:
        name: Its name.
        work: One of `KINDS_OF_WORK`.
        opcode: Its opcode; of a collective its kind, such as `all-gather`.
        shape: The shape of its result, without layouts.
        seconds: Seconds of one execution, None if there is no estimate. A collective counts for the
            time in which nothing else runs.
        executions: How often a step executes it on a device, a mean if branches are marked.
        marked: Whether it is in a branch whose share of executions is known.
        unmarked: Whether it is in a branch whose share is unknown, which counts as always taken.
        source: The line of Python, as `file:line`.
        op_name: The place in the traced program.
    """

    name: str
    work: str
    opcode: str
    shape: str
    seconds: float | None
    executions: float
    marked: bool
    unmarked: bool
    source: str
    op_name: str

    @property
    def total(self) -> float:
        """Returns the seconds of a step, 0 without an estimate."""
        return (self.seconds or 0.0) * self.executions


def instruction_costs(hlo_text: str, rates: DeviceRates) -> tuple[InstructionCost, ...]:
    """Lists the instructions that a step executes on a TPU, with their times.

    A loop multiplies by its trip count. Of the branches of a conditional the dearest counts, as
    often as a name scope `taken_3_of_10` says, else always.

    Returns:
        The instructions in program order. Those that cost nothing, and asynchronous copies, which
        overlap, are left out.

    Raises:
        ValueError: If the text is not that of a compiled program.
    """
    module = parse_hlo(hlo_text)
    visit = partial(_visit, rates, read_sources(hlo_text))
    return tuple(walk(module, visit, _seconds))


_FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier"),
        *("after-all", "partition-id", "replica-id", "domain", "copy-start", "send"),
        *("call-update", "async-update"),
    )
)
_ENTERED = ("while", "conditional", "call", "call-start", "async-start")


def _visit(
    rates: DeviceRates,
    sources: Sources,
    scope: Scope,
    instruction: Instruction,
    context: CallContext,
    *,
    collectives: bool = True,
) -> tuple[Sequence[InstructionCost], bool]:
    """Returns the cost of an instruction, unless it is a collective and these are left out."""
    opcode = instruction.opcode
    found = _collective(scope, instruction)
    if found is not None:
        if not collectives:
            return [], False
        exposed = _exposed_seconds(rates, sources, scope, instruction, found, context)
        return [_cost(instruction, context, sources, COLLECTIVE, exposed, found)], False
    if opcode in _FREE or opcode.endswith("-done"):
        return [], False
    if opcode in _ENTERED:
        return [], True
    work = _work(scope.module, instruction)
    seconds = _busy_seconds(rates, scope.computation, instruction)
    return [_cost(instruction, context, sources, work, seconds)], False


def _cost(
    instruction: Instruction,
    context: CallContext,
    sources: Sources,
    work: str,
    seconds: float | None,
    collective: Collective | None = None,
) -> InstructionCost:
    return InstructionCost(
        instruction.name,
        work,
        collective.kind if collective else instruction.opcode,
        collective.shape if collective else without_layouts(instruction.shape),
        seconds,
        float(context.executions * context.executed_share),
        context.executed_share != 1,
        context.conditional and context.executed_share == 1,
        sources.line(instruction),
        op_name(instruction) or context.op_name,
    )


def _seconds(found: Sequence[InstructionCost]) -> float:
    return sum((cost.total for cost in found), 0.0)


def _busy_seconds(
    rates: DeviceRates, computation: Computation, instruction: Instruction
) -> float | None:
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


def _work(module: Module, instruction: Instruction) -> str:
    """Returns the kind of work that an instruction is, by what it or its fusion contains."""
    if instruction.opcode == "custom-call":
        return KERNEL
    body = [instruction]
    if instruction.opcode == "fusion":
        body = list(module.computations[callee(instruction)].instructions.values())
    opcodes = {x.opcode for x in body if not x.shape.split("{")[0].endswith("[]")}
    if opcodes & {"convolution", "dot"}:
        return MATMUL
    if opcodes <= _FILLS and "broadcast" in opcodes:
        return FILL
    return COPY if opcodes <= _MOVES else ELEMENT_WISE


def _collective(scope: Scope, instruction: Instruction) -> Collective | None:
    """Returns the collective that an instruction, or the fusion that it is, starts or runs."""
    if instruction.opcode != "fusion":
        return starting_collective(scope.computation, instruction, fused=False)
    body = scope.module.computations[callee(instruction)]
    found = (starting_collective(body, x, fused=True) for x in body.instructions.values())
    return next((collective for collective in found if collective), None)


def _exposed_seconds(
    rates: DeviceRates,
    sources: Sources,
    scope: Scope,
    start: Instruction,
    found: Collective,
    context: CallContext,
) -> float:
    """Returns the time of a collective, less that of what runs between its start and its end."""
    seconds = transfer_seconds(
        found.kind, found.result_bytes, found.groups, rates, across_slices=found.across_slices
    )
    if context.asynchronous or not found.asynchronous:
        return seconds
    # Other collectives are not asked what they overlap with: windows lie in windows, and each would
    # walk through those inside it again.
    visit = partial(_visit, rates, sources, collectives=False)
    for instruction in instructions_between(scope, start):
        overlapping = walk_instruction(scope, instruction, context, visit, _seconds)
        seconds -= _seconds(tuple(overlapping)) / context.executions
    return max(0.0, seconds)
