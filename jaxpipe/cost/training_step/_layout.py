"""A layout: how a training step is spread over devices and time."""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from ...schedules import Schedule

AXES = ("data", "stage", "fsdp", "tensor", "expert", "context")
Remat = Literal["none", "selective", "full"]
Gather = Literal["tick", "repeat", "once", "layer"]


@dataclass(frozen=True)
class Layout:
    """The mesh, the schedule and the choices of a training step."""

    data: int = 1  # replicas of the weights
    stage: int = 1  # ranks of the pipeline
    fsdp: int = 1  # devices that share weights and gather them
    tensor: int = 1  # devices that split products and activations
    expert: int = 1  # devices that divide the experts; they also divide the batch
    context: int = 1  # devices that divide each sequence
    microbatches: int = 1  # microbatches of a step, of one replica
    rows: int = 1  # sequences of a microbatch on one device group that divides the batch
    sequence: int = 2048  # tokens of a sequence
    schedule: str | Schedule | None = None  # a name of `jaxpipe.schedules`; None: no pipeline
    chunks: int = 1  # stages on each rank
    layers_per_stage: tuple[int, ...] | None = None  # in forward order; None: as even as possible
    remat: Remat = "none"  # the part of a forward that is computed again in the backward
    recomputed: float | None = None  # the fraction that is computed again; None: as `remat` says
    # The fraction of the products of attention that is computed again; None: as `recomputed` says.
    recomputed_attention: float | None = None
    # When weights that `fsdp` shares are gathered: for every action ("tick"), once for the
    # microbatches in a row on a stage ("repeat"), once a step ("once"), or layer by layer in every
    # action ("layer").
    gather: Gather = "tick"
    # Bytes of a gradient that is scattered; None: those of a weight that is gathered.
    scattered_bytes: float | None = None
    summed_bytes: float = 4.0  # of a gradient that replicas sum
    # Whether the devices that share weights are one ring, also along several axes of a torus.
    gathers_in_one_ring: bool = False
    hosts: int = 0  # groups that only the network joins; 0: as few as the hardware's links allow
    order: tuple[str, ...] = AXES  # mesh axes, those whose neighbours are farthest apart first
    dtype: str = "bf16"  # the dtype of matrix products
    experts_over_tensor: bool = False  # `tensor` divides experts, not the parts of each
    deduplicate_experts: bool = False  # a token is sent once to all its experts of a link domain
    # Whether each device along `expert` gathers the tokens of all of these, sorts all of their
    # rows, and multiplies those of its own experts. If not, devices exchange rows. Devices that
    # gather also divide the other weights, as `fsdp` does.
    experts_gather: bool = False
    # Whether devices along `context` also divide the weights, as `fsdp` does, and exchange half of
    # their queries, so that all have the same work. If not, they hold copies.
    context_gathers: bool = False
    sequence_parallel: bool = True  # `tensor` also divides what is between products
    # Bytes that the optimizer and the norm of the gradients read and write per weight. Adam in
    # float32 with weights in bfloat16: the gradient twice, weight and two moments each read and
    # written, the weight written in bfloat16.
    optimizer_bytes: float = 34.0
    shared_optimizer: bool = True  # replicas divide the optimizer's state (ZeRO-1)
    vocab_parallel: bool = False  # all ranks of the pipeline share the head
    # Kinds of communication that run beside computation, as far as there is enough: "tensor",
    # "fsdp", "gradient_reduction", "point_to_point", "experts", "context".
    overlap: tuple[str, ...] = ("fsdp", "gradient_reduction", "point_to_point", "context")

    def __post_init__(self) -> None:
        for name in (*AXES, "microbatches", "rows", "sequence", "chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}. Give at least 1.")
        if sorted(self.order) != sorted(AXES):
            raise ValueError(f"`order` is {self.order}. Give each of {', '.join(AXES)} once.")

    @property
    def devices(self) -> int:
        """Returns the number of devices."""
        return prod(self.size(axis) for axis in AXES)

    @property
    def num_weight_shards(self) -> int:
        """Devices that gather weights from each other."""
        return self.num_expert_shards * (self.expert if self.experts_gather else 1)

    @property
    def num_expert_shards(self) -> int:
        """Devices that gather the weights of an expert from each other."""
        return prod(self.size(axis) for axis in self.weight_axes)

    @property
    def weight_axes(self) -> tuple[str, ...]:
        """Axes that divide all weights, those of experts too."""
        return ("fsdp", "context") if self.context_gathers else ("fsdp",)

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.data * self.fsdp * self.expert * self.microbatches * self.rows

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on a device, before `tensor` divides them."""
        return self.rows * self.sequence / self.context

    def size(self, axis: str) -> int:
        """Returns the size of a mesh axis."""
        return getattr(self, axis)

    def stride(self, axis: str) -> int:
        """Returns the distance of neighbours along an axis, in devices."""
        return self._strides[axis]

    @cached_property
    def _strides(self) -> dict[str, int]:
        sizes = [self.size(axis) for axis in self.order]
        return {axis: prod(sizes[index + 1 :]) for index, axis in enumerate(self.order)}
