"""Seconds of one matrix product: the larger of what its operations and its bytes take."""

from math import ceil

from ..devices import Efficiency, Hardware

Size = int | float

_TILE = 128  # rows and columns of the tiles that matrix units compute


def product_seconds(
    m: Size, k: Size, n: Size, dtype: str, hardware: Hardware, reached: Efficiency
) -> float:
    """Returns the seconds of a product of [m, k] by [k, n].

    Args:
        m: Rows, usually tokens.
        k: The contracted size.
        n: Columns.
        dtype: The dtype of its operands.
        hardware: The device.
        reached: The fractions of its peaks.

    Returns:
        Seconds.
    """
    padded = 2.0 * _padded(m) * k * _padded(n)
    operations = padded / (hardware.peak_flops(dtype) * reached.products)
    moved = 2.0 * (m * k + k * n + m * n) / (hardware.memory_bandwidth * reached.memory)
    return max(operations, moved)


def _padded(size: Size) -> int:
    return ceil(size / _TILE) * _TILE
