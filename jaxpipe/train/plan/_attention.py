"""Selects the kernel of a run's attention: by the devices, and by what each kernel can compute."""

from dataclasses import dataclass

import jax

from ..._compat import splash_aborts_in_pipelines
from ...models.layers import (
    Attention,
    Rope,
    cudnn_attention,
    dot_product_attention,
    pallas_gpu_attention,
    rope,
    rope_by_product,
    splash_attention,
)
from ...sharding import Rules


@dataclass(frozen=True)
class AttentionPlan:
    """What a kernel of attention is selected by.

    Attributes:
        wanted: The value of `attention`.
        platform: The platform of the devices.
        length: T, the number of tokens per row.
        packed: Whether a row may have several documents.
        dtype: The dtype of activations.
        head_dim: C, the number of channels of a query head.
        context_size: The number of devices that sequences are split over.

    Raises:
        ValueError: If a kernel is wanted and it cannot run.
    """

    wanted: str
    platform: str
    length: int
    packed: bool
    dtype: str
    head_dim: int
    context_size: int

    def __post_init__(self):
        assert self.kernel

    @property
    def kernel(self) -> str:
        """Selects the kernel: the one that is wanted, or for `auto` the first that can run.

        On TPUs that is splash attention, on GPUs cuDNN's, then JAX's Pallas kernel.

        Returns:
            `splash`, `cudnn`, `pallas` or `dot_product`.

        Raises:
            ValueError: If a kernel is wanted and it cannot run.
        """
        if self.wanted == "dot_product":
            return "dot_product"
        wanted = tuple(_PROBLEMS) if self.wanted == "auto" else (self.wanted,)
        for kernel in wanted:
            problems = [text for text, applies in _PROBLEMS[kernel](self).items() if applies]
            if not problems:
                return kernel
            if self.wanted == kernel:
                raise ValueError(
                    f"`attention` is {kernel!r}, but {'; '.join(problems)}. Give 'auto' or "
                    "'dot_product'."
                )
        return "dot_product"

    def function(self, rules: Rules) -> Attention:
        """Returns the attention that the kernel computes.

        Returns:
            A function with the contract of `dot_product_attention`.
        """
        match self.kernel:
            case "splash":
                return splash_attention(rules)
            case "cudnn":
                return cudnn_attention(rules, packed=self.packed)
            case "pallas":
                return pallas_gpu_attention(rules)
        return dot_product_attention

    @property
    def rotate(self) -> Rope:
        """Returns the rotary positions that suit the devices."""
        return rope_by_product if self.platform == "tpu" else rope


def _splash_problems(plan: AttentionPlan) -> dict[str, bool]:
    return {
        f"the devices are {plan.platform}s, not TPUs": plan.platform != "tpu",
        f"`max_target_length` is {plan.length}, not a multiple of 128": plan.length % 128 != 0,
        _SPLIT: plan.context_size > 1,
        f"jax {jax.__version__} cannot compile it in a pipeline (take 0.11 or newer, or set "
        "JAX_USE_SHARDY_PARTITIONER=false)": splash_aborts_in_pipelines(),
    }


def _cudnn_problems(plan: AttentionPlan) -> dict[str, bool]:
    return {
        f"the devices are {plan.platform}s, not GPUs": plan.platform != "gpu",
        f"`dtype` is {plan.dtype}, not bfloat16 or float16": plan.dtype not in _HALF,
        # Of up to 256 channels on Hopper and newer, which JAX does not know without a GPU.
        f"heads have {plan.head_dim} channels, not a multiple of 8 up to 128": plan.head_dim > 128
        or plan.head_dim % 8 != 0,
        f"`max_target_length` is {plan.length}, an odd number": plan.length % 2 != 0,
        _SPLIT: plan.context_size > 1,
    }


def _pallas_problems(plan: AttentionPlan) -> dict[str, bool]:
    return {
        f"the devices are {plan.platform}s, not GPUs": plan.platform != "gpu",
        f"`dtype` is {plan.dtype}, not bfloat16 or float16": plan.dtype not in _HALF,
        f"`max_target_length` is {plan.length}, not a multiple of 128": plan.length % 128 != 0,
        _SPLIT: plan.context_size > 1,
    }


_SPLIT = "sequences are split over the axis 'context'"
_HALF = ("bfloat16", "float16")
_PROBLEMS = {"splash": _splash_problems, "cudnn": _cudnn_problems, "pallas": _pallas_problems}
