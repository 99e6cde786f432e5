"""Seconds of one matrix product: a roofline, whose result is written after it is computed.

The time of writing is what makes products with a short contracted dimension inefficient.
"""

from math import ceil

from ...devices import Hardware
from ._efficiency import Efficiency

Size = int | float

_TILE = 128  # rows and columns of the tiles that matrix units compute


def product_seconds(
    m: Size, k: Size, n: Size, peak_flops: float, hardware: Hardware, reached: Efficiency
) -> float:
    """Returns the seconds of a product of [m, k] by [k, n]."""
    operations = 2.0 * _padded(m) * k * _padded(n) / peak_flops
    memory_rate = hardware.memory_bandwidth * reached.memory
    return max(operations, 2.0 * (m * k + k * n) / memory_rate) + 2.0 * m * n / memory_rate


def _padded(size: Size) -> int:
    return ceil(size / _TILE) * _TILE
