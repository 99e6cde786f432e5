"""How much of its peaks a kind of device reaches. These constants, and no others, are fitted."""

from dataclasses import dataclass

from ._hardware import Hardware


@dataclass(frozen=True)
class Efficiency:
    """The fractions of the peaks of a device that programs reach.

    Attributes:
        products: Of the peak of large matrix products in the dtype of the run.
        head: Of the peak in bfloat16, in the products of the head.
        experts: Products of experts, as a fraction of what equally large ones reach.
        attention: Of the peak in bfloat16, in fused attention.
        memory: Of the bandwidth of memory, in elementwise operations and the optimizer.
        links: Of the bandwidth of links, in large collectives.
        network: Of the bandwidth of the network, in large collectives.
        kernel_seconds: What each operation takes beside its work.
    """

    products: float
    head: float
    experts: float
    attention: float
    memory: float
    links: float
    network: float
    kernel_seconds: float


def efficiency(device: Hardware, dtype: str) -> Efficiency:
    """Returns the efficiency of a kind of device in a dtype.

    Args:
        device: The kind of device.
        dtype: The dtype of matrix products, such as "bf16" or "fp8".

    Returns:
        The fractions.
    """
    device.peak_flops(dtype)  # checks the dtype
    products = {"bf16": 0.75, "int8": 0.65, "fp8": 0.6, "mxfp8": 0.55, "nvfp4": 0.45}[dtype]
    return Efficiency(products, 0.75, 0.6, 0.5, 0.8, 0.75, 0.8, 4e-6)
