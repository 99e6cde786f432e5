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
    """

    base_num_decoder_layers: int
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
