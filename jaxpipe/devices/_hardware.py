"""Kinds of devices: names, peaks, memory and networks, each with the page that says so.

Bandwidths are of one direction, in bytes a second, of one device as JAX counts devices. What
kernels reach of a GPU's peak in bfloat16 is measured on an H200 (docs/benchmarks.md).
"""

from dataclasses import dataclass

_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True)
class GpuTarget:
    """The description of a GPU that XLA:GPU compiles by; the names are those of its text.

    As drivers report them: their memory and bandwidth are not those of the data sheet.
    """

    cuda_capability: int
    core_count: int
    fpus_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    clock_rate_ghz: float
    memory_bandwidth: int
    l2_cache_size: int
    device_memory_size: int


@dataclass(frozen=True)
class Hardware:
    """A kind of device, and how devices of that kind are joined.

    Attributes:
        kind: The name of the kind, such as "v5p" or "h100".
        device_kinds: Its names in JAX; the first is that of devices which are absent.
        peak_tflops: 1e12 operations a second of dense matrix products in bfloat16 that accumulate
            in float32.
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
        chip: The kind that first had this chip: other memory or another host does not change what
            fraction of its peak a program reaches.
        aliases: Other names of the kind.
        devices_per_chip: Devices of a chip.
        cores_per_chip: TensorCores of a chip, which the names of slices, such as `v5p-64`, count.
        clock_ghz: 1e9 cycles a second of a TensorCore: the peak divided by two operations for every
            multiplier of its matrix units; 0 for GPUs.
        vmem_bytes: Bytes of the vector memory of a TensorCore; 0 for GPUs.
        sparse_cores: SparseCores of a chip that collectives can run on; 0 for GPUs.
        peaks_of_boards: Names in JAX of other boards with this chip, and their peaks. Only their
            peaks are known: their memory and links differ.
        gpu_target: The description that XLA:GPU compiles by; None if there is none.
        host_bandwidth: Bytes a second that a device sends to its host, or receives from it; 0 if no
            page says it.
    """

    kind: str
    device_kinds: tuple[str, ...]
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
    chip: str = ""
    aliases: tuple[str, ...] = ()
    devices_per_chip: int = 1
    cores_per_chip: int = 1
    clock_ghz: float = 0.0
    vmem_bytes: int = 0
    sparse_cores: int = 0
    peaks_of_boards: tuple[tuple[str, float], ...] = ()
    gpu_target: GpuTarget | None = None
    host_bandwidth: float = 0.0

    @property
    def is_gpu(self) -> bool:
        """Tells whether it is a GPU; the others are TPUs."""
        return not self.torus_axes

    @property
    def widest_cudnn_head(self) -> int | None:
        """Returns the most channels of a head of cuDNN's attention, 256 from Hopper on; of GPUs."""
        has_fp8 = "fp8" in dict(self.peak_factors)  # as all from Hopper on have
        return (256 if has_fp8 else 128) if self.is_gpu else None

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
# Seconds of a small message over links and over the network; on GPUs by NCCL. They are ours.
_TPU_LATENCY = (1e-6, 2e-5)
_GPU_LATENCY = (3e-6, 1e-5)
_TPU_PAGES, _GPU_PAGES = "docs.cloud.google.com/tpu/docs/", "nvidia.com/en-us/data-center/"

# As XLA has them in xla/backends/gpu/target_config/specs, where it has read them from devices.
_AMPERE_TARGET = (8, 108, 64, 167_936, 166_912, 1.41)
_HOPPER_TARGET = (9, 132, 128, 233_472, 232_448, 1.98)
_A100_40_TARGET = GpuTarget(*_AMPERE_TARGET, 1_555_200_000_000, 41_943_040, 42_331_013_120)
_A100_TARGET = GpuTarget(*_AMPERE_TARGET, 2_039_040_000_000, 41_943_040, 85_100_068_864)
_H100_TARGET = GpuTarget(*_HOPPER_TARGET, 3_352_320_000_000, 52_428_800, 84_942_979_072)
_H200_TARGET = GpuTarget(*_HOPPER_TARGET, 4_800_000_000_000, 52_428_800, 151_397_597_184)
_B200_TARGET = GpuTarget(
    *(10, 148, 128, 233_472, 232_448, 1.965),
    *(7_672_320_000_000, 132_644_864, 191_514_411_008),
)

# fmt: off
_TPUS = (
    # Names, peak, bytes and bandwidth of memory, of links along one axis of the torus (two links,
    # one direction each) and of the data centre's network, devices of a host of 4 chips and of the
    # largest slice, latencies, axes of the torus, clock, a core's vector memory (jax 0.11.2,
    # jax/_src/tpu_info.py). Where a page has no figure of the network, a v5e has half of a v5p's,
    # the others have it. XLA runs no collective on the SparseCores of a v4. Bandwidths to the host
    # are those of jax-ml.github.io/scaling-book/tpus.
    Hardware("v4", ("TPU v4",), 275.0, 32 * _GIB, 1228e9, 100e9, 6.25e9, 4, 4096, *_TPU_LATENCY, 3,
             (), _TPU_PAGES + "v4", "v4", cores_per_chip=2, clock_ghz=1.05, vmem_bytes=16 * _MIB,
             host_bandwidth=15e9),
    Hardware("v5e", ("TPU v5 lite", "TPU v5e"), 197.0, 16 * _GIB, 819e9, 100e9, 3.125e9, 4, 256,
             *_TPU_LATENCY, 2, _INT8, _TPU_PAGES + "v5e", "v5e", ("v5litepod",), clock_ghz=1.5,
             vmem_bytes=128 * _MIB, host_bandwidth=15e9),
    Hardware("v5p", ("TPU v5", "TPU v5p"), 459.0, 95 * _GIB, 2765e9, 200e9, 6.25e9, 4, 6144,
             *_TPU_LATENCY, 3, _INT8, _TPU_PAGES + "v5p", "v5p", cores_per_chip=2, clock_ghz=1.75,
             vmem_bytes=64 * _MIB, sparse_cores=4, host_bandwidth=15e9),
    Hardware("v6e", ("TPU v6 lite", "TPU v6e"), 918.0, 32 * _GIB, 1638e9, 200e9, 6.25e9, 4, 256,
             *_TPU_LATENCY, 2, _INT8, _TPU_PAGES + "v6e", "v6e", ("v6litepod",), clock_ghz=1.75,
             vmem_bytes=128 * _MIB, sparse_cores=2, host_bandwidth=32e9),
    # A chip is two devices, which share its links and its network: its page has 2307 and 192 GiB.
    Hardware("tpu7x", ("TPU7x",), 1153.5, 96 * _GIB, 3690e9, 100e9, 6.25e9, 8, 18432,
             *_TPU_LATENCY, 3, (("fp8", 2.0),), _TPU_PAGES + "tpu7x", "tpu7x", ("v7x",),
             devices_per_chip=2, cores_per_chip=2, clock_ghz=2.2, vmem_bytes=64 * _MIB,
             sparse_cores=4),
)
_GPUS = (
    # Names, peak without sparsity, bytes and bandwidth of memory, of NVLink and of the host's
    # adapters per GPU, GPUs of a host (DGX and HGX, or a tray of a rack) and of an NVLink domain.
    # The GB of data sheets are nearly the GiB of nvidia-smi; H200 and B200 have a little less. To
    # the host there are 16 lanes of PCIe, or for each of two GPUs half of NVLink-C2C.
    Hardware("a100-40gb", ("NVIDIA A100-SXM4-40GB",), 312.0, 40 * _GIB, 1555e9, 300e9, 25e9, 8, 8,
             *_GPU_LATENCY, 0, _INT8, _GPU_PAGES + "a100", "a100",
             peaks_of_boards=(("NVIDIA A100-PCIE-40GB", 312.0),), gpu_target=_A100_40_TARGET,
             host_bandwidth=32e9),
    Hardware("a100", ("NVIDIA A100-SXM4-80GB",), 312.0, 80 * _GIB, 2039e9, 300e9, 25e9, 8, 8,
             *_GPU_LATENCY, 0, _INT8, _GPU_PAGES + "a100, dgx-a100", "a100",
             peaks_of_boards=(("NVIDIA A100 80GB PCIe", 312.0),), gpu_target=_A100_TARGET,
             host_bandwidth=32e9),
    Hardware("h100", ("NVIDIA H100 80GB HBM3",), 989.0, 80 * _GIB, 3350e9, 450e9, 50e9, 8, 8,
             *_GPU_LATENCY, 0, _HOPPER, _GPU_PAGES + "h100, dgx-h100", "h100",
             peaks_of_boards=(("NVIDIA H100 PCIe", 756.0),), gpu_target=_H100_TARGET,
             host_bandwidth=64e9),
    Hardware("h200", ("NVIDIA H200",), 989.0, 140 * _GIB, 4800e9, 450e9, 50e9, 8, 8, *_GPU_LATENCY,
             0, _HOPPER, _GPU_PAGES + "h200, dgx-h200", "h100", gpu_target=_H200_TARGET,
             host_bandwidth=64e9),
    Hardware("b200", ("NVIDIA B200",), 2250.0, 179 * _GIB, 8000e9, 900e9, 50e9, 8, 8, *_GPU_LATENCY,
             0, _BLACKWELL, _GPU_PAGES + "dgx-b200, hgx", "b200", gpu_target=_B200_TARGET,
             host_bandwidth=64e9),
    Hardware("b300", ("NVIDIA B300",), 2250.0, 268 * _GIB, 8000e9, 900e9, 100e9, 8, 8,
             *_GPU_LATENCY, 0, _BLACKWELL_ULTRA, _GPU_PAGES + "dgx-b300, hgx", "b300",
             host_bandwidth=64e9),
    Hardware("gb200", ("NVIDIA GB200",), 2500.0, 185 * _GIB, 8000e9, 900e9, 50e9, 4, 72,
             *_GPU_LATENCY, 0, _BLACKWELL, _GPU_PAGES + "gb200-nvl72", "b200",
             host_bandwidth=225e9),
    Hardware("gb300", ("NVIDIA GB300",), 2500.0, 277 * _GIB, 8000e9, 900e9, 100e9, 4, 72,
             *_GPU_LATENCY, 0, _BLACKWELL_ULTRA, _GPU_PAGES + "gb300-nvl72", "b300",
             host_bandwidth=225e9),
)
# fmt: on

HARDWARE: dict[str, Hardware] = {row.kind: row for row in (*_TPUS, *_GPUS)}
"""The kinds of devices by name."""

_BY_DEVICE_KIND = {name: row for row in HARDWARE.values() for name in row.device_kinds}
_BOARDS = {name: peak for row in HARDWARE.values() for name, peak in row.peaks_of_boards}
_KIND_OF_ALIAS = {alias: row.kind for row in HARDWARE.values() for alias in row.aliases}


def generation_of(name: str) -> str | None:
    """Returns the kind that a name or an alias means, or None if it is not in the table.

    Args:
        name: A name, such as "v5p" or "v5litepod".

    Returns:
        The kind.

    Example:
        >>> generation_of("v5litepod"), generation_of("v5")
        ('v5e', None)
    """
    kind = _KIND_OF_ALIAS.get(name, name)
    return kind if kind in HARDWARE else None


def hardware(device: str) -> Hardware:
    """Returns a kind of device by its name.

    Args:
        device: The generation, such as "v5p" or "h100", or an alias of it.

    Returns:
        Its figures.

    Raises:
        ValueError: If the kind is not in the table. The message lists those that are.

    Example:
        >>> hardware("v5p").peak_tflops
        459.0
    """
    kind = generation_of(device)
    if kind is None:
        raise ValueError(f"`device` is {device!r}. Give one of {', '.join(HARDWARE)}.")
    return HARDWARE[kind]


def find_hardware(device_kind: str) -> Hardware | None:
    """Returns a kind of device by its name in JAX, or None if it is not in the table.

    Args:
        device_kind: The `device_kind` of a device, such as "TPU v5".

    Returns:
        Its figures.

    Example:
        >>> found = find_hardware("TPU v5")
        >>> found and found.kind
        'v5p'
    """
    return _BY_DEVICE_KIND.get(device_kind)


def find_peak_tflops(device_kind: str) -> float | None:
    """Returns the peak of a device by its name in JAX, or None if it is not known.

    Args:
        device_kind: The `device_kind` of a device, such as "TPU v5" or "NVIDIA H100 PCIe".

    Returns:
        1e12 operations a second of dense matrix products in bfloat16.

    Example:
        >>> find_peak_tflops("NVIDIA H100 PCIe")
        756.0
    """
    row = find_hardware(device_kind)
    return _BOARDS.get(device_kind) if row is None else row.peak_tflops


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
