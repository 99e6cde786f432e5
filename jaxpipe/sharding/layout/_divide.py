"""Counts that must divide: the batch into microbatches, the layers into stages."""

from dataclasses import dataclass
from itertools import accumulate, chain


def divide_exactly(whole: int, parts: int, *, name: str, into: str, fix: str) -> int:
    """Returns `whole / parts`, or raises an error that names both and says what to change.

    Raises:
        ValueError: If `parts` is below 1, or does not divide `whole`.

    Example:
        >>> divide_exactly(8, 4, name="`batch`", into="`microbatches`", fix="Change one of them.")
        2
    """
    if parts < 1:
        raise ValueError(f"{into} is {parts}. Give at least 1.")
    if whole % parts:
        raise ValueError(f"{name} is {whole}, not a multiple of {into} = {parts}. {fix}")
    return whole // parts


@dataclass(frozen=True)
class LayerLayout:
    """The assignment of the layers of a model to stages and ranks.

    Attributes:
        num_repeats: R, stages per rank.
        num_ranks: S, the ranks of the pipeline.
        layers_per_stage: Consecutive layers in a stage, or room for so many.
        stages: [R, S] the stage of the model at each repeat and rank; None: stage
            `repeat * num_ranks + rank`.
        counts: The number of layers of each stage, if not all have `layers_per_stage`.
        slots: The positions of the layers of each stage among its `layers_per_stage`; None: the
            first ones.
    """

    num_repeats: int
    num_ranks: int
    layers_per_stage: int
    stages: tuple[tuple[int, ...], ...] | None = None
    counts: tuple[int, ...] | None = None
    slots: tuple[tuple[int, ...], ...] | None = None

    @property
    def num_layers(self) -> int:
        """Returns the number of layers of all stages."""
        return sum(self._counts)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Returns the layer at every position of `dims`, -1 where there is only padding."""
        layers = self.stage_layer_ids
        order = chain(*self.stages) if self.stages else range(len(layers))
        ids: list[int] = []
        for stage in order:
            at = self.slots[stage] if self.slots else range(len(layers[stage]))
            layer_of = dict(zip(at, layers[stage], strict=True))
            ids += [layer_of.get(slot, -1) for slot in range(self.layers_per_stage)]
        return tuple(ids)

    @property
    def stage_layer_ids(self) -> tuple[range, ...]:
        """Returns the layers of every stage, in forward order."""
        ends = tuple(accumulate(self._counts, initial=0))
        return tuple(map(range, ends, ends[1:]))

    @property
    def _counts(self) -> tuple[int, ...]:
        return self.counts or (self.layers_per_stage,) * (self.num_repeats * self.num_ranks)

    @property
    def dims(self) -> tuple[int, int, int]:
        """Returns [R, S, layers per stage], the leading dims of every stacked layer weight."""
        return self.num_repeats, self.num_ranks, self.layers_per_stage


def even_layout(
    num_layers: int,
    *,
    num_ranks: int,
    layers_per_stage: int,
    num_repeats: int = -1,
    name: str = "`base_num_decoder_layers`",
) -> LayerLayout:
    """Returns the layout of `num_layers` over `num_ranks`, with equal stages.

    Raises:
        ValueError: If the layers are not `num_repeats * num_ranks * layers_per_stage`.

    Example:
        >>> even_layout(8, num_ranks=2, layers_per_stage=2).dims
        (2, 2, 2)
    """
    per_repeat = num_ranks * layers_per_stage
    repeats = divide_exactly(
        num_layers,
        per_repeat,
        name=name,
        into="ranks x `num_layers_per_pipeline_stage`",
        fix="Choose ranks and layers per stage whose product divides the layers.",
    )
    if num_repeats not in (-1, repeats):
        raise ValueError(
            f"`num_pipeline_repeats` is {num_repeats}, but {num_layers} layers over {num_ranks} "
            f"ranks with {layers_per_stage} per stage make {repeats} repeats. Give {repeats} or -1."
        )
    return LayerLayout(repeats, num_ranks, layers_per_stage)
