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


GENERATIONS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}


def kind_bytes(device_kind: str) -> int | None:
    """Returns the bytes of memory of a device by its name in JAX, or None if it is not known.

    Args:
        device_kind: The `device_kind` of a device, such as "TPU v5".

    Returns:
        The bytes.

    Example:
        >>> kind_bytes("TPU v5") // 2**30
        95
    """
    generation = GENERATIONS.get(device_kind)
    return None if generation is None else DEVICE_BYTES[generation]
