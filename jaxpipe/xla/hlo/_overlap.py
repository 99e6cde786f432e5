"""Finds what runs while an asynchronous collective does."""

import re

from ._collectives import ended_chain
from ._parse import Instruction, Module, called_computations, callee
from ._trips import Scope


def instructions_between(scope: Scope, start: Instruction) -> list[Instruction]:
    """Returns the instructions from a collective's start, or a chain of fusions', to its end."""
    after, parts = [], {start.name}
    instructions = iter(scope.computation.instructions.values())
    for instruction in instructions:
        if instruction is start:
            break
    for instruction in instructions:
        if parts & set(instruction.operands):
            if instruction.opcode.endswith("-done") or _ends_chain(scope.module, instruction):
                return after
            parts.add(instruction.name)
        after.append(instruction)
    return after


def _ends_chain(module: Module, instruction: Instruction) -> bool:
    """Tells whether a fusion ends a collective that an earlier one has started."""
    if instruction.opcode != "fusion":
        return False
    return bool(ended_chain(module.computations[callee(instruction)]))


_PRODUCTS = re.compile(
    # Of kernels in Triton, those of Pallas: its attention, and products of experts.
    r'custom_call_target="[^"]*(gemm|matmul|fmha|splash|gmm|xla\.gpu\.triton)|__triton_gemm'
)
_CALLED = ("calls", "to_apply", "body", "branch_computations")


def multiplies_matrices(module: Module, instruction: Instruction) -> bool:
    """Tells whether an instruction, or what it calls, has a matrix product or calls attention."""
    if instruction.opcode in ("dot", "convolution") or _PRODUCTS.search(instruction.attributes):
        return True
    if instruction.opcode not in ("fusion", "call", "while", "conditional"):
        return False
    names = [name for key in _CALLED for name in called_computations(instruction, key)]
    return any(
        multiplies_matrices(module, inside)
        for name in names
        for inside in module.computations[name].instructions.values()
    )
