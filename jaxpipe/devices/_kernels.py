"""What kernels reach of a GPU's peak in bfloat16: measured on an H200 (docs/benchmarks.md)."""

_CUDNN = {64: 0.31, 128: 0.5, 192: 0.32, 256: 0.30}
"""Attention, forward and backward, by the most channels of a head: of 4,096 tokens, with 128
channels the mean of 4,096 and 32,768."""

GROUPED_PRODUCTS = 0.42
"""Products of rows grouped by expert, in jaxpipe's kernel: 372 to 450 TFLOP/s."""

PALLAS_ATTENTION = 0.12
"""Attention in Pallas's kernel, forward and backward: 95 to 147 TFLOP/s."""


def cudnn_attention(channels: int) -> float:
    """Returns the share of the peak that cuDNN's attention reaches.

    Args:
        channels: The channels of a head, at most 256.

    Returns:
        A fraction of the peak in bfloat16.

    Example:
        >>> cudnn_attention(192)
        0.32
    """
    return next(share for most, share in _CUDNN.items() if channels <= most)
