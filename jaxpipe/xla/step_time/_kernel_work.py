"""The operations of kernels, which XLA does not see: by their names, operands and scopes."""

import math
import re

from ...devices import GROUPED_PRODUCTS, PALLAS_ATTENTION, cudnn_attention
from ..hlo._parse import Computation, Instruction, array_sizes, op_name

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


def gpu_kernel_work(
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
