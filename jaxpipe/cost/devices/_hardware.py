"""Kinds of devices: peaks, memory and networks, each with the page that says so.

Bandwidths are of one direction, in bytes a second, of one device as JAX counts devices.
"""

from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """A kind of device, and how devices of that kind are joined.

    Attributes:
        kind: The name of the kind, such as "v5p" or "h100".
        peak_tflops: 1e12 operations a second of dense matrix products in bfloat16.
        memory_bytes: Bytes of the memory of a device.
        memory_bandwidth: Bytes a second that a device reads or writes.
        link_bandwidth: Bytes a second that a device sends to devices that links join it with: over
            NVLink to all others of its domain; on TPUs over one of the axes of the torus, both
            ways round.
        network_bandwidth: Bytes a second that a device sends to other hosts or slices.
        devices_per_host: Devices of one host.
        link_domain: The most devices that links join: a host or rack with NVLink, a slice of TPUs.
        link_latency: Seconds until the first byte of a message between linked devices arrives.
        network_latency: The same between hosts or slices.
        torus_axes: Axes of the torus that links make; 0 where a switch joins all with all.
        peak_factors: The peak of other dtypes as multiples of that of bfloat16.
        source: Where these figures are from.
    """

    kind: str
    peak_tflops: float
    memory_bytes: int
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    devices_per_host: int
    link_domain: int
    link_latency: float
    network_latency: float
    torus_axes: int
    peak_factors: tuple[tuple[str, float], ...]
    source: str

    def peak_flops(self, dtype: str) -> float:
        """Returns the operations a second of dense matrix products in a dtype.

        Args:
            dtype: "bf16", "fp8", "mxfp8", "int8" or "nvfp4".

        Returns:
            Operations a second.

        Raises:
            ValueError: If the device has no peak for that dtype.
        """
        factors = {"bf16": 1.0, **dict(self.peak_factors)}
        if dtype not in factors:
            raise ValueError(
                f"`dtype` is {dtype!r}, for which {self.kind} has no peak. "
                f"Give one of {', '.join(factors)}."
            )
        return 1e12 * self.peak_tflops * factors[dtype]


_INT8 = (("int8", 2.0),)
_HOPPER = (("int8", 2.0), ("fp8", 2.0))
_BLACKWELL = (("int8", 2.0), ("fp8", 2.0), ("mxfp8", 2.0), ("nvfp4", 4.0))
_BLACKWELL_ULTRA = (("fp8", 2.0), ("mxfp8", 2.0), ("nvfp4", 6.0))  # few units for int8
_TPU_LATENCY = (1e-6, 2e-5)
_GPU_LATENCY = (3e-6, 1e-5)


def _tpu(
    kind: str,
    peak_tflops: float,
    memory_gib: int,
    memory_gb: float,
    link_gb: float,
    network_gb: float,
    slice_devices: int,
    factors: tuple[tuple[str, float], ...],
) -> Hardware:
    """Returns a TPU; the page of its kind has all figures but latencies, which are ours."""
    page = "tpu7x" if kind == "tpu7x" else kind
    return Hardware(
        kind,
        peak_tflops,
        memory_gib * _GIB,
        1e9 * memory_gb,
        1e9 * link_gb,
        1e9 * network_gb,
        8 if kind == "tpu7x" else 4,
        slice_devices,
        *_TPU_LATENCY,
        2 if kind in ("v5e", "v6e") else 3,
        factors,
        f"docs.cloud.google.com/tpu/docs/{page}",
    )


def _gpu(
    kind: str,
    peak_tflops: float,
    memory_gib: int,
    memory_gb: float,
    link_gb: float,
    network_gb: float,
    domain: int,
    factors: tuple[tuple[str, float], ...],
    source: str,
) -> Hardware:
    """Returns a GPU; latencies are those of a small NCCL message, which are ours."""
    return Hardware(
        kind,
        peak_tflops,
        memory_gib * _GIB,
        1e9 * memory_gb,
        1e9 * link_gb,
        1e9 * network_gb,
        min(domain, 8) if domain <= 8 else 4,
        domain,
        *_GPU_LATENCY,
        0,
        factors,
        source,
    )


_DGX = "nvidia.com/en-us/data-center/"
HARDWARE: dict[str, Hardware] = {
    found.kind: found
    for found in (
        # Peak, GiB, GB/s of memory, GB/s of links along one axis of the torus (two links, one
        # direction each), GB/s of the data centre's network, devices of the largest slice. Where
        # a page has no figure of the network, a v5e has half of a v5p's, the others have it.
        _tpu("v4", 275.0, 32, 1228.0, 100.0, 6.25, 4096, ()),
        _tpu("v5e", 197.0, 16, 819.0, 100.0, 3.125, 256, _INT8),
        _tpu("v5p", 459.0, 95, 2765.0, 200.0, 6.25, 6144, _INT8),
        _tpu("v6e", 918.0, 32, 1638.0, 200.0, 6.25, 256, _INT8),
        # A chip is two devices, which share its links and its network.
        _tpu("tpu7x", 1153.5, 96, 3690.0, 100.0, 6.25, 18432, (("fp8", 2.0),)),
        # Peak without sparsity, GiB, GB/s of memory, of NVLink and of the host's adapters per GPU.
        _gpu("a100-40gb", 312.0, 40, 1555.0, 300.0, 25.0, 8, _INT8, f"{_DGX}a100"),
        _gpu("a100", 312.0, 80, 2039.0, 300.0, 25.0, 8, _INT8, f"{_DGX}a100, dgx-a100"),
        _gpu("h100", 989.0, 80, 3350.0, 450.0, 50.0, 8, _HOPPER, f"{_DGX}h100, dgx-h100"),
        _gpu("h200", 989.0, 140, 4800.0, 450.0, 50.0, 8, _HOPPER, f"{_DGX}h200, dgx-h200"),
        _gpu("b200", 2250.0, 179, 8000.0, 900.0, 50.0, 8, _BLACKWELL, f"{_DGX}dgx-b200, hgx"),
        _gpu(
            "b300", 2250.0, 268, 8000.0, 900.0, 100.0, 8, _BLACKWELL_ULTRA, f"{_DGX}dgx-b300, hgx"
        ),
        _gpu("gb200", 2500.0, 185, 8000.0, 900.0, 50.0, 72, _BLACKWELL, f"{_DGX}gb200-nvl72"),
        _gpu(
            "gb300",
            2500.0,
            277,
            8000.0,
            900.0,
            100.0,
            72,
            _BLACKWELL_ULTRA,
            f"{_DGX}gb300-nvl72",
        ),
    )
}
"""The kinds of devices by name."""


def hardware(kind: str) -> Hardware:
    """Returns a kind of device by its name.

    Args:
        kind: The generation, such as "v5p" or "h100".

    Returns:
        Its figures.

    Raises:
        ValueError: If the kind is not in the table. The message lists those that are.

    Example:
        >>> hardware("v5p").peak_tflops
        459.0
    """
    if kind not in HARDWARE:
        raise ValueError(f"`kind` is {kind!r}. Give one of {', '.join(HARDWARE)}.")
    return HARDWARE[kind]
