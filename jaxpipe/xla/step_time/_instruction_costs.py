"""Says what one instruction costs: on a TPU by the compiler's estimates, on a GPU by a roofline.

XLA:TPU writes `estimated_cycles` beside instructions. Kernels have none: they are counted by their
operations at a stated share of the device's peak: of the Pallas kernels that our models call, by
the shapes of operands.

For a GPU XLA estimates no time. An instruction takes as long as its products at the rate that large
ones reach, or as long as its bytes at the rate that large copies reach, whichever is longer.
Launches take nothing.
"""

import math
import re
from dataclasses import dataclass, replace

from ..hlo._collectives import KINDS
from ..hlo._parse import (
    Computation,
    Instruction,
    Module,
    array_sizes,
    callee,
    shape_bytes,
)
from ._kernel_work import gpu_kernel_work, kernel_flops
from ._rates import GpuRates, Rates

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


PRODUCTS, COPIES = 0.8, 0.9
"""Shares of the peaks that large bfloat16 products and copies reach on an H200, by measurement."""


def roofline_seconds(
    rates: GpuRates, module: Module, computation: Computation, instruction: Instruction
) -> float | None:
    """Returns the seconds of an instruction; None for kernels whose operations are not known."""
    if instruction.opcode == "fusion-start":
        instruction = replace(instruction, opcode="fusion")
    if instruction.opcode.removesuffix("-start").removesuffix("-done") in KINDS:
        return 0.0  # what a collective reads and writes is in the time that it transfers
    match = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    target = match[1] if match else ""
    if target == "AllocateBuffer":
        return 0.0  # nothing is written
    moved = moved_bytes(module, computation, instruction) / (COPIES * rates.memory_gb * 1e9)
    peak = rates.peak_tflops * 1e12
    if instruction.opcode != "custom-call":
        return max(moved, product_flops(module, computation, instruction) / (PRODUCTS * peak))
    if target.startswith("__cublas"):
        return max(moved, _flops_of_product(computation, instruction) / (PRODUCTS * peak))
    work = gpu_kernel_work(computation, instruction, target)
    return None if work is None else max(moved, work[0] / (work[1] * peak))


def product_flops(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Returns the operations of the products that an instruction is or that its fusion has."""
    if instruction.opcode == "fusion":
        computation = module.computations[callee(instruction)]
        parts = list(computation.instructions.values())
    else:
        parts = [instruction]
    return sum((_flops_of_product(computation, x) for x in parts if x.opcode == "dot"), 0.0)


_CONTRACTING = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([^\]}]*)')
"""In a dot, and in the configuration of a call of cuBLAS."""


def _flops_of_product(computation: Computation, product: Instruction) -> float:
    contracting = _CONTRACTING.search(product.attributes)
    left = array_sizes(computation.instructions[product.operands[0]].shape)
    dims = [int(d) for d in re.findall(r"\d+", contracting[1])] if contracting else []
    return 2.0 * math.prod(array_sizes(product.shape)) * math.prod(left[d] for d in dims)


_SAME = frozenset(("bitcast", "reshape", "copy", "convert", "transpose", "get-tuple-element"))
_PART = frozenset(("dynamic-slice", "slice", "gather"))


def moved_bytes(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Returns the bytes that an instruction reads and writes.

    Of arrays that it takes slices of it reads the slices, and it writes slices into others in
    place.
    """
    shapes = [computation.instructions[name].shape for name in instruction.operands]
    if instruction.opcode != "fusion":
        return _alone(instruction, shapes)
    body = module.computations[callee(instruction)]
    users: dict[str, list[Instruction]] = {}
    for x in body.instructions.values():
        for name in x.operands:
            users.setdefault(name, []).append(x)
    parameters = [x for x in body.instructions.values() if x.opcode == "parameter"]
    return sum((_read(x, users) for x in parameters), 0.0) + _written(body, body.root)


def _alone(instruction: Instruction, shapes: list[str]) -> float:
    if instruction.opcode in _PART:
        return 2.0 * shape_bytes(instruction.shape)
    if instruction.opcode == "dynamic-update-slice":
        return 2.0 * shape_bytes(shapes[1])
    return float(shape_bytes(instruction.shape) + sum(map(shape_bytes, shapes)))


def _read(x: Instruction, users: dict[str, list[Instruction]]) -> float:
    """Returns the bytes of an array that its users read."""
    whole, parts = float(shape_bytes(x.shape)), 0.0
    for user in users.get(x.name, []):
        if user.opcode in _PART and user.operands[0] == x.name:
            parts += shape_bytes(user.shape)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == x.name:
            continue
        elif user.opcode in _SAME:
            parts += _read(user, users) * whole / max(shape_bytes(user.shape), 1)
        else:
            return whole
    return min(parts, whole)


def _written(body: Computation, root: Instruction) -> float:
    if root.opcode == "tuple":
        return sum((_written(body, body.instructions[name]) for name in root.operands), 0.0)
    if root.opcode in _SAME and root.operands:
        inner = body.instructions[root.operands[0]]
        if inner.opcode == "dynamic-update-slice":
            return _written(body, inner)
    if root.opcode == "dynamic-update-slice":
        return float(shape_bytes(body.instructions[root.operands[1]].shape))
    return float(shape_bytes(root.shape))
