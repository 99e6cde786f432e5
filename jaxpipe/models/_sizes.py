"""What the sizes of all families of decoders say, with the values of a plain one."""

from typing import ClassVar

from ..kernels import Scores


class DecoderSizes:
    """The sizes of a decoder, of which a family overrides what differs.

    Attributes:
        base_num_decoder_layers: The number of layers.
        norm_offset: A number that is added to stored scales of norms.
        has_biases_and_sinks: Whether the products of attention add biases, and heads have sinks:
            scores without a value.
        rope_types: The values that `rope_type` may have.
    """

    base_num_decoder_layers: int
    rope_type: str
    rope_types: ClassVar[tuple[str, ...]]
    norm_offset: ClassVar[float] = 0.0
    has_biases_and_sinks: ClassVar[bool] = False

    @property
    def layers_per_block(self) -> int:
        """Returns the number of layers of a block, which the pipeline counts as one layer."""
        return 1

    @property
    def num_dense_layers(self) -> int:
        """Returns the number of first layers that run before the pipeline."""
        return 0

    @property
    def num_blocks(self) -> int:
        """Returns the number of layers of the model, as a pipeline counts them."""
        return self.base_num_decoder_layers // self.layers_per_block

    @property
    def num_pipeline_layers(self) -> int:
        """Returns the number of layers that a pipeline may have."""
        return self.num_blocks - self.num_dense_layers

    @property
    def attention_scores(self) -> tuple[Scores, ...]:
        """Returns the scores of each kind of layers; here one kind, causal."""
        return (Scores(),)

    @property
    def chunk(self) -> int:
        """Returns the tokens of a chunk, which layers of kind 0 do not see beyond; 0: no chunks."""
        return 0

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """Returns the index of the kind of every layer of the pipeline; () if there is one kind."""
        return ()

    def _check_rope_type(self) -> None:
        if self.rope_type not in self.rope_types:
            types = " or ".join(map(repr, self.rope_types))
            raise ValueError(f"`rope_type` is {self.rope_type!r}. Give {types}.")


def check_even(name: str, channels: int) -> None:
    """Checks the number of channels of a head that have rotary positions."""
    if channels % 2:
        raise ValueError(f"`{name}` is {channels}. Rotary positions need an even number.")


def check_num_chosen(num_experts_per_tok: int, most: int) -> None:
    """Checks that a token can choose so many experts."""
    if not 1 <= num_experts_per_tok <= most:
        raise ValueError(
            f"`num_experts_per_tok` is {num_experts_per_tok}, and a token chooses among {most} "
            f"experts. Give 1 to {most}."
        )
