"""Says what one instruction costs: on a TPU by the compiler's estimates, on a GPU by a roofline.

XLA:TPU writes `estimated_cycles` beside instructions. Kernels have none, and XLA does not see their
operations: those of the Pallas kernels that our models call are counted by names, operands and
scopes, at a stated share of the device's peak.

For a GPU XLA estimates no time. An instruction takes as long as its products at the rate that large
ones reach, or as long as its bytes at the rate that large copies reach, whichever is longer.
Launches take nothing.
"""

import math
import re
from dataclasses import dataclass, replace

from ...devices import GROUPED_PRODUCTS, PALLAS_ATTENTION, cudnn_attention
from ..hlo._collectives import KINDS
from ..hlo._parse import (
    Computation,
    Instruction,
    Module,
    array_sizes,
    callee,
    op_name,
    shape_bytes,
)
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
        return _roofline_seconds(rates, module, computation, instruction)
    cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    if cycles and int(cycles[1]) < 2**62:
        return int(cycles[1]) / rates.clock_ghz / 1e9
    if instruction.opcode != "custom-call":
        return None
    flops = _kernel_flops(computation, instruction)
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


def _roofline_seconds(
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
    work = _gpu_kernel_work(computation, instruction, target)
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


_ATTENTION_PRODUCTS = {
    # Products of [queries, d] with [keys, d], of which causal masks leave out half.
    "splash_mha_fwd": 2,
    "splash_mqa_fwd": 2,
    "splash_mha_dkv": 4,
    "splash_mqa_dkv": 4,
    "splash_mha_dq": 3,
    "splash_mqa_dq": 3,
}
_FUSED_BACKWARD = 5


def _kernel_flops(computation: Computation, call: Instruction) -> float | None:
    """Returns the operations of splash attention or of Megablox; None for other kernels."""
    operands = [computation.instructions[name].shape for name in call.operands]
    shapes = [array_sizes(shape) for shape in operands]
    attention = re.search(r"splash_m[hq]a_(fwd|dkv|dq)", call.attributes + call.name)
    if attention:
        # Before queries and keys come tables of integers.
        arrays = [
            array_sizes(shape) for shape in operands if shape.startswith(("bf16", "f16", "f32"))
        ]
        queries, keys = arrays[0], arrays[1]
        products = _ATTENTION_PRODUCTS[attention[0]]
        if attention[1] == "dkv" and '"use_fused_bwd_kernel\\": true' in call.attributes:
            products = _FUSED_BACKWARD
        share = _named_share("pairs", computation, call) or 1 / 2
        return products * 2 * math.prod(queries) * keys[-2] * share
    if _is_grouped_product(shapes):
        (m, k), n = shapes[5], array_sizes(call.shape)[-1]
        return 2.0 * m * k * n * (_named_share("rows", computation, call) or 1)
    return None


def _is_grouped_product(shapes: list[list[int]]) -> bool:
    """Returns whether these are the operands of Megablox's kernels, whose names XLA drops."""
    # These are an offset, the groups' first rows, the groups and rows of tiles, another offset, and
    # two matrices.
    ranks = [len(sizes) for sizes in shapes[:7]]
    return ranks in ([0, 1, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 2, 2]) and shapes[2] == shapes[3]


def _named_share(what: str, computation: Computation, call: Instruction) -> float | None:
    """Returns the share that is multiplied, by a name scope such as `rows_1_of_4`; None if none."""
    # Where XLA drops the scope of the call, that of its neighbours counts.
    for instruction in (call, *computation.instructions.values()):
        shares = re.findall(rf"\b{what}_(\d+)_of_(\d+)\b", op_name(instruction))
        if shares:
            return int(shares[-1][0]) / int(shares[-1][1])
    return None


def _gpu_kernel_work(
    computation: Computation, call: Instruction, target: str
) -> tuple[float, float] | None:
    """Returns the operations of a kernel that is known, and the share of the peak it reaches."""
    if target.startswith("__cudnn$fmha"):
        flops, channels = _attention_flops(computation, call)
        return flops, cudnn_attention(channels)
    kernel = re.search(r'name = "(\w+)"', call.attributes)
    shapes = [array_sizes(computation.instructions[name].shape) for name in call.operands]
    match kernel[1] if kernel else "":
        case "jaxpipe_gmm" | "jaxpipe_gmm_transposed" | "jaxpipe_gmm_outer":
            # Rows by weights [groups, depth, width], or rows by rows.
            *_, left, right = shapes
            width = array_sizes(call.shape)[-1] if len(right) == 3 else right[-1]
            share = _named_share("rows", computation, call) or 1.0
            return 2.0 * math.prod(left) * width * share, GROUPED_PRODUCTS
        case "mha_forward" | "mha_backward" as name:
            queries, keys = shapes[:2]  # [b, T, H, C]
            products = 2 if name == "mha_forward" else 5
            share = _named_share("pairs", computation, call) or 1 / 2
            return products * 2.0 * math.prod(queries) * keys[1] * share, PALLAS_ATTENTION
        case "mha_preprocess_backward":
            return 0.0, 1.0
    return None


def _attention_flops(computation: Computation, call: Instruction) -> tuple[float, int]:
    """Returns the operations of cuDNN's attention, and the channels of a head."""
    queries, keys = (array_sizes(computation.instructions[x].shape) for x in call.operands[:2])
    products = 5 if "Backward" in call.attributes else 2
    # [b, T, H, C]. With a mask that it reads, cuDNN computes what the mask leaves out.
    causal = re.search(r'"mask_type": ?"CAUSAL"', call.attributes)
    has_mask = "ScaleBias" in call.attributes
    seen = keys[1] / 2 if causal and not has_mask else float(keys[1])
    window = re.search(r'"sliding_window_length": ?"?(\d+)', call.attributes)
    if window and 0 < int(window[1]) < keys[1]:
        size = int(window[1])
        seen = size - size**2 / (2 * keys[1])
    return products * 2.0 * math.prod(queries) * seen, queries[3]
