"""How much of its peaks a kind of device reaches.

The constants in capitals are fitted to published measurements by docs/_predictions.py, and a test
compares them with what it suggests; docs/predictions.md says how well they predict. The others are
round numbers that nobody fitted.
"""

from dataclasses import dataclass

from ...devices import Hardware

# Of the peak in large products, in bfloat16 on A100 and TPUs, in fp8 on the others.
PRODUCTS = {"a100": 0.75, "h100": 0.61, "b200": 0.52, "b300": 0.64, "v5p": 0.9, "v6e": 0.6}
# Of what is reached in fp8, or in bfloat16 on v5p.
DTYPES = {"mxfp8": 0.91, "nvfp4": 0.66, "int8": 0.95}
# Of what equally large products reach, with the newest release that has a row: 26.02 of
# Megatron-Bridge for b200 and gb300, 26.04 for h100, 26.06 for b300 and gb200.
EXPERTS = {"h100": 0.28, "b200": 0.32, "b300": 0.62, "gb200": 1.0, "gb300": 0.94, "v5p": 0.35}


@dataclass(frozen=True)
class Efficiency:
    """The fractions of the peaks of a device that programs reach."""

    products: float  # the fraction of the peak, in the dtype of the run, of large matrix products
    head: float  # the fraction of the peak in bfloat16 of the products of the head
    experts: float  # products of experts, as a fraction of what equally large ones reach
    attention: float = 0.5  # the fraction of the peak in bfloat16 of fused attention
    attention_by_heads: bool = False  # whether that depends on the channels of a head, as measured
    # The fraction of the memory bandwidth in elementwise operations and the optimizer.
    memory: float = 0.8
    links: float = 0.75  # the fraction of the bandwidth of links in large collectives
    network: float = 0.8  # the fraction of the bandwidth of the network in large collectives
    writing: float = 1.0  # the share of a product's result that is written after all is computed
    kernel_seconds: float = 4e-6  # the seconds that each operation takes beside its work


def efficiency(device: Hardware, dtype: str) -> Efficiency:
    """Returns the efficiency of a kind of device in a dtype."""
    # Without a measurement, a TPU has that of a v5p, and a GPU in bfloat16 that of an A100.
    device.peak_flops(dtype)  # checks the dtype
    chip = device.chip
    if device.torus_axes and chip not in PRODUCTS:
        chip = "v5p"
    wide = PRODUCTS[chip if device.torus_axes else "a100"]
    eight_bits = PRODUCTS.get(chip, wide) * DTYPES.get(dtype, 1.0)
    near = EXPERTS["v5p" if device.torus_axes else "h100"]
    experts = EXPERTS.get(device.kind, EXPERTS.get(chip, near))
    products = wide if dtype == "bf16" else eight_bits
    return Efficiency(products, wide, experts, attention_by_heads=chip == "h100")
