"""The memory of accelerators, by the name of their generation."""

_GIB = 2**30

DEVICE_BYTES = {
    # docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e and tpu7x: 192 a chip, which is two devices.
    "v4": 32 * _GIB,
    "v5e": 16 * _GIB,
    "v5p": 95 * _GIB,
    "v6e": 32 * _GIB,
    "tpu7x": 96 * _GIB,
    # NVIDIA's data sheets, whose GB are nearly GiB of nvidia-smi; H200 and B200 have a little less.
    "a100-40gb": 40 * _GIB,
    "a100": 80 * _GIB,
    "h100": 80 * _GIB,
    "h200": 140 * _GIB,
    "b200": 179 * _GIB,
}
"""Bytes of memory of a device as JAX counts devices."""


def device_bytes(device: str) -> int:
    """Returns the bytes of memory of a device.

    Args:
        device: The generation, such as "v5p" or "h100".

    Returns:
        The bytes.

    Raises:
        ValueError: If the generation is not in the table.

    Example:
        >>> device_bytes("v5p") // 2**30
        95
    """
    if device not in DEVICE_BYTES:
        raise ValueError(f"`device` is {device!r}. Give one of {', '.join(DEVICE_BYTES)}.")
    return DEVICE_BYTES[device]
