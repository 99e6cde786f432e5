"""The peaks of devices: dense matrix products in bfloat16 that accumulate in float32."""

PEAK_TFLOPS = {
    # docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e and tpu7x: 2307 a chip, which is two devices.
    "TPU v4": 275.0,
    "TPU v5 lite": 197.0,
    "TPU v5e": 197.0,
    "TPU v5": 459.0,
    "TPU v5p": 459.0,
    "TPU v6 lite": 918.0,
    "TPU v6e": 918.0,
    "TPU7x": 1153.5,
    # NVIDIA's data sheets of A100, H100, H200 and HGX B200, without sparsity.
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H200": 989.0,
    "NVIDIA B200": 2250.0,
}
"""The peak of a device by the `device_kind` of JAX, in 1e12 floating-point operations a second."""
