"""Counts the operations of the Pallas kernels that our models call, by the shapes of operands."""

import re

from ..hlo._parse import Computation, Instruction, op_name

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


def kernel_flops(computation: Computation, call: Instruction) -> float | None:
    """Returns the operations of causal splash attention or of Megablox; None for other kernels."""
    shapes = [_sizes(computation.instructions[name].shape) for name in call.operands]
    attention = re.search(r"splash_m[hq]a_(fwd|dkv|dq)", call.attributes + call.name)
    if attention:
        arrays = [sizes for sizes in shapes if len(sizes) >= 3 and sizes[-1] > 8]
        queries, keys = arrays[0], arrays[1]
        products = _ATTENTION_PRODUCTS[attention[0]]
        if attention[1] == "dkv" and '"use_fused_bwd_kernel\\": true' in call.attributes:
            products = _FUSED_BACKWARD
        rows = 1
        for size in queries[:-2]:
            rows *= size
        return products * 2 * rows * queries[-2] * keys[-2] * queries[-1] / 2
    if _is_grouped_product(shapes):
        (m, k), n = shapes[5], _sizes(call.shape)[-1]
        return 2.0 * m * k * n * _multiplied_share(computation, call)
    return None


def _is_grouped_product(shapes: list[list[int]]) -> bool:
    """Returns whether these are the operands of Megablox's kernels, whose names XLA drops.

    These are an offset, the groups' first rows, the groups and rows of tiles, another offset, and
    two matrices.
    """
    ranks = [len(sizes) for sizes in shapes[:7]]
    return ranks in ([0, 1, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 2, 2]) and shapes[2] == shapes[3]


def _multiplied_share(computation: Computation, call: Instruction) -> float:
    """Returns the share of rows that have a group, by a name scope `rows_1_of_4`, 1 if none.

    Where XLA drops the scope of the call, that of its neighbours counts.
    """
    for instruction in (call, *computation.instructions.values()):
        shares = re.findall(r"\brows_(\d+)_of_(\d+)\b", op_name(instruction))
        if shares:
            return int(shares[-1][0]) / int(shares[-1][1])
    return 1.0


def _sizes(shape: str) -> list[int]:
    found = re.match(r"[a-z0-9]+\[([\d,]*)\]", shape)
    return [int(size) for size in found[1].split(",") if size] if found else []
