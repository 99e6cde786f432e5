"""A layout: how a training step is spread over devices and time."""

from dataclasses import dataclass
from math import prod
from typing import Literal

from ...schedules import Schedule

AXES = ("data", "stage", "fsdp", "tensor", "expert", "context")
Remat = Literal["none", "selective", "full"]
Gather = Literal["tick", "repeat", "once", "layer"]


@dataclass(frozen=True)
class Layout:
    """The mesh, the schedule and the choices of a training step.

    Attributes:
        data: Replicas of the weights.
        stage: Ranks of the pipeline.
        fsdp: Devices that share weights and gather them.
        tensor: Devices that split products and activations.
        expert: Devices that divide the experts; they also divide the batch.
        context: Devices that divide each sequence.
        microbatches: Microbatches of a step, of one replica.
        rows: Sequences of a microbatch on one device group that divides the batch.
        sequence: Tokens of a sequence.
        schedule: A name of `jaxpipe.schedules`, a schedule, or None for no pipeline.
        chunks: The number of stages on each rank.
        layers_per_stage: [stages, in forward order] layers; None for as even as possible.
        remat: The part of a forward that is computed again in the backward.
        recomputed: The fraction of a forward that is computed again; None for that of `remat`.
        gather: When weights that `fsdp` shares are gathered: for every action ("tick"), once for
            the microbatches in a row on a stage ("repeat"), once a step ("once"), or layer by layer
            in every action ("layer").
        hosts: Groups of devices that only the network joins, such as slices; 0 for as few as the
            links of the hardware allow.
        order: Mesh axes, from those whose neighbours are farthest apart to the nearest.
        dtype: The dtype of matrix products.
        experts_over_tensor: Whether the devices of `tensor` have experts of their own, not parts
            of the same.
        deduplicate_experts: Whether a token is sent once to all of its experts that one domain of
            links has, not to each of them.
        experts_gather: Whether each device along `expert` gathers the tokens of all of these, sorts
            all of their rows, and multiplies those of its own experts. If not, devices exchange
            rows. Devices that gather also divide the other weights, as `fsdp` does.
        sequence_parallel: Whether `tensor` also divides what is between products.
        optimizer_bytes: Bytes that the optimizer and the norm of the gradients read and write per
            weight; 34 for Adam in float32 with weights in bfloat16: the gradient twice, weight and
            two moments each read and written, the weight written in bfloat16.
        shared_optimizer: Whether replicas divide the optimizer's state (ZeRO-1).
        vocab_parallel: Whether all ranks of the pipeline share the head.
        overlap: Kinds of communication that run beside computation, as far as there is enough:
            "tensor", "fsdp", "gradient_reduction", "point_to_point", "experts", "context".
    """

    data: int = 1
    stage: int = 1
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1
    context: int = 1
    microbatches: int = 1
    rows: int = 1
    sequence: int = 2048
    schedule: str | Schedule | None = None
    chunks: int = 1
    layers_per_stage: tuple[int, ...] | None = None
    remat: Remat = "none"
    recomputed: float | None = None
    gather: Gather = "tick"
    hosts: int = 0
    order: tuple[str, ...] = AXES
    dtype: str = "bf16"
    experts_over_tensor: bool = False
    deduplicate_experts: bool = False
    experts_gather: bool = False
    sequence_parallel: bool = True
    optimizer_bytes: float = 34.0
    shared_optimizer: bool = True
    vocab_parallel: bool = False
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
        return self.fsdp * (self.expert if self.experts_gather else 1)

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
        return prod(self.size(nearer) for nearer in self.order[self.order.index(axis) + 1 :])
