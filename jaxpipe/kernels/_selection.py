"""Selects the kernel of attention: by the devices, and by what each kernel can compute."""

from dataclasses import dataclass

from .._compat import check_cudnn, widest_cudnn_head
from ..sharding import Rules
from ._dot_product import dot_product_attention
from ._on_mesh import (
    GRANULARITY,
    Attention,
    cudnn_attention,
    pallas_gpu_attention,
    sliced_dot_product_attention,
    splash_attention,
)
from ._scores import CAUSAL, Scores

LARGEST_STORED = 2**32
"""Bytes of scores of one layer on a device above which they are stored only if that is asked for:
float32 scores of a sequence of 32,768 tokens and one head."""

_HALF = ("bfloat16", "float16")


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
        scores: How scores are computed.
        has_sinks: Whether every head has a sink, a score without a value.
        key: The user's name for `wanted`.
        widest_head: The most channels of a head that cuDNN has on GPUs that are absent; None: what
            JAX says of those of this process.

    Raises:
        ValueError: If a kernel is wanted and it cannot run.
    """

    wanted: str
    platform: str
    length: int
    packed: bool
    dtype: str
    head_dim: int
    context_size: int = 1
    scores: Scores = CAUSAL
    has_sinks: bool = False
    key: str = "attention"
    widest_head: int | None = None

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
        problems = self.problems
        kernel = next((name for name, texts in problems.items() if not texts), "dot_product")
        if self.wanted not in ("auto", kernel):
            raise ValueError(
                f"`{self.key}` is {self.wanted!r}, but {'; '.join(problems[self.wanted])}. Give "
                "'auto' or 'dot_product'."
            )
        return kernel

    @property
    def computes_whole_square(self) -> bool:
        """Returns whether the kernel computes all T x T scores, also those that no query sees.

        cuDNN's does with a mask of documents: on an H200 it then takes twice the time
        (docs/benchmarks.md, One GPU). Within a window it was not measured, and counts as without.
        """
        reads_mask = self.kernel == "cudnn" and self.packed and self.scores.window is None
        return self.kernel == "dot_product" or reads_mask

    @property
    def problems(self) -> dict[str, tuple[str, ...]]:
        """Returns the reasons for which requested kernels cannot run, by preference."""
        names = tuple(_PROBLEMS) if self.wanted == "auto" else (self.wanted,)
        return {
            name: tuple(text for text, applies in _PROBLEMS[name](self).items() if applies)
            for name in names
            if name in _PROBLEMS
        }

    @property
    def reason(self) -> str:
        """Says in a sentence which kernel runs, and why those that were preferred do not."""
        kernel, why = self.kernel, dict[str, str]()
        if self.wanted == "dot_product":
            return "attention stores its scores (dot_product), as it was asked for"
        for name, texts in self.problems.items():
            if name == kernel:
                break
            if self.platform == _PLATFORMS[name]:
                why[name] = ", ".join(texts)
        what = "stores its scores (dot_product)" if kernel == "dot_product" else f"runs {kernel}"
        if self.platform not in _PLATFORMS.values():
            return f"attention {what}: {self.platform}s have no kernel"
        return "; ".join([f"attention {what}", *(f"not {n}: {text}" for n, text in why.items())])

    def check_compiles(self) -> None:
        """Checks that this process has what compiling the kernel needs.

        Raises:
            ValueError: If it is cuDNN's and JAX finds no cuDNN.
        """
        if self.kernel == "cudnn":
            check_cudnn()

    def function(self, rules: Rules) -> Attention:
        """Returns the attention that the kernel computes.

        Returns:
            A function with the contract of `dot_product_attention`, which is given sinks too if the
            plan has them.
        """
        match self.kernel:
            case "splash":
                return splash_attention(rules, self.scores)
            case "cudnn":
                return cudnn_attention(rules, self.scores, packed=self.packed)
            case "pallas":
                return pallas_gpu_attention(rules, self.scores)
        if self.context_size == 1 and self.scores == CAUSAL and not self.has_sinks:
            return dot_product_attention
        return sliced_dot_product_attention(rules, self.scores)


def check_stored_scores(plan: AttentionPlan, rows: int, heads: int) -> None:
    """Checks that scores which no one asked to store are not too large.

    Args:
        plan: The facts by which the kernel is selected.
        rows: The sequences of a device.
        heads: The query heads of a device.

    Raises:
        ValueError: If they are larger than 4 GiB.
    """
    if plan.kernel != "dot_product" or plan.wanted == "dot_product":
        return
    size = rows * heads * plan.length**2 // plan.context_size * 4
    if size > LARGEST_STORED:
        raise ValueError(
            f"Attention would store {size / 1e9:.1f} GB of scores of every layer on a device "
            f"({rows} sequences x {heads} heads x {plan.length // plan.context_size} queries x "
            f"{plan.length} keys in float32), because no kernel runs: {plan.reason}. Make one run, "
            f"or give `{plan.key}=dot_product` to store them."
        )


def _splash_problems(plan: AttentionPlan) -> dict[str, bool]:
    block, length = GRANULARITY["splash"], plan.length // plan.context_size
    return {
        f"the devices are {plan.platform}s, not TPUs": plan.platform != "tpu",
        f"a device has {length} tokens of a sequence, not a multiple of {block}": (
            plan.length % (block * plan.context_size) != 0
        ),
    }


def _cudnn_problems(plan: AttentionPlan) -> dict[str, bool]:
    length, widest = plan.length // plan.context_size, plan.widest_head or widest_cudnn_head()
    return {
        f"the devices are {plan.platform}s, not GPUs": plan.platform != "gpu",
        f"`dtype` is {plan.dtype}, not bfloat16 or float16": plan.dtype not in _HALF,
        f"heads have {plan.head_dim} channels, not a multiple of 8 up to {widest}": (
            plan.head_dim > widest or plan.head_dim % 8 != 0
        ),
        f"a device has {length} tokens of a sequence, an odd number": length % 2 != 0,
        "it has no soft cap": plan.scores.soft_cap is not None,
        "it has no sinks": plan.has_sinks,
    }


def _pallas_problems(plan: AttentionPlan) -> dict[str, bool]:
    return {
        f"the devices are {plan.platform}s, not GPUs": plan.platform != "gpu",
        f"`dtype` is {plan.dtype}, not bfloat16 or float16": plan.dtype not in _HALF,
        f"sequences have {plan.length} tokens, not a multiple of 128": plan.length % 128 != 0,
        "sequences are split over the axis 'context'": plan.context_size > 1,
        "it has no soft cap": plan.scores.soft_cap is not None,
        "it has no window": plan.scores.window is not None,
        "it has no sinks": plan.has_sinks,
    }


_PROBLEMS = {"splash": _splash_problems, "cudnn": _cudnn_problems, "pallas": _pallas_problems}
_PLATFORMS = {"splash": "tpu", "cudnn": "gpu", "pallas": "gpu"}
