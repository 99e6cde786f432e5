"""What a prediction of time rests on: published steps that were predicted without being fitted to.

The table is written by docs/_predictions.py, and a test compares it with what the script finds.
"""

from typing import NamedTuple

from ...devices import HARDWARE, Hardware


class Evidence(NamedTuple):
    """How far published steps were from predictions.

    Attributes:
        rows: Published steps of such devices and models; 0 if there are none.
        pipelined: The number of them that had a pipeline.
        low: The least of measured over predicted seconds, without a tenth of many rows.
        high: The most of it, likewise.
        last: The year and month of the newest; "" if no source says it.
    """

    rows: int
    pipelined: int
    low: float
    high: float
    last: str


# By kind of device, and whether a model has experts.
EVIDENCE = {
    ("a100", False): Evidence(6, 4, 0.96, 1.06, "2022-05"),
    ("b200", False): Evidence(7, 4, 0.98, 1.02, "2025-11"),
    ("b200", True): Evidence(14, 9, 0.94, 2.18, "2026-04"),
    ("b300", True): Evidence(11, 9, 0.59, 1.67, "2026-06"),
    ("gb200", False): Evidence(13, 6, 0.88, 1.18, "2026-02"),
    ("gb200", True): Evidence(25, 19, 0.82, 1.51, "2026-08"),
    ("gb300", False): Evidence(26, 22, 0.92, 1.04, "2026-06"),
    ("gb300", True): Evidence(9, 5, 0.96, 1.82, "2026-02"),
    ("h100", False): Evidence(30, 17, 0.93, 1.17, "2026-06"),
    ("h100", True): Evidence(13, 13, 0.75, 1.99, "2026-04"),
    ("tpu7x", False): Evidence(2, 0, 1.18, 1.22, ""),
    ("v5e", False): Evidence(24, 0, 0.94, 1.2, ""),
    ("v5p", False): Evidence(14, 0, 0.89, 1.17, ""),
    ("v5p", True): Evidence(1, 0, 1.25, 1.25, ""),
    ("v6e", False): Evidence(4, 0, 0.94, 1.41, ""),
}

OWN_PROGRAMS = Evidence(26, 5, 0.84, 1.26, "2026-11")
"""Programs of models of functions, NNX and Equinox, most of them of others, as XLA:TPU compiled
them for v5p: GPTs, encoders, scans, convolutions, local attention, experts (docs/plan.md). What
they took is by the compiler's cycles."""

OWN_MEMORY = 0.9, 1.5
"""The least and the most of compiled over planned memory of these programs, but for one with
convolutions and GroupNorm, which needed 2.1."""


def evidence(device: Hardware, *, has_experts: bool) -> Evidence:
    """Returns the published steps of a kind of device, or of all of its sort if it has none.

    Returns:
        Rows of the kind, or of another with the same chip. Without any `rows` is 0, and the range
        that of all TPUs, or of all GPUs, widened by experts if the model has some.
    """
    same_chip = (kind for kind, row in HARDWARE.items() if row.chip == device.chip)
    for kind in (device.kind, *same_chip):
        if (kind, has_experts) in EVIDENCE and EVIDENCE[kind, has_experts].rows > 1:
            return EVIDENCE[kind, has_experts]
    like = [
        row
        for (kind, experts), row in EVIDENCE.items()
        if HARDWARE[kind].is_gpu == device.is_gpu and (has_experts or not experts)
    ]
    return Evidence(0, 0, min(row.low for row in like), max(row.high for row in like), "")
