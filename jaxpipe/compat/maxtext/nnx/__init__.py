"""MaxText's pipeline in NNX: `create_pipeline(config, layers, mesh)`."""

from ._pipeline import NNXCircularPipeline as CircularPipeline
from ._pipeline import NNXPipeline as Pipeline
from ._pipeline import NNXPipelineBase as PipelineBase
from ._pipeline import create_nnx_pipeline as create_nnx_pipeline
from ._pipeline import create_pipeline as create_pipeline
from ._stacked import Factory as Factory
from ._stacked import name_of as name_of
from ._stacked import one_stage as one_stage
from ._stage import check_unchanged as check_unchanged
from ._stage import overwritten_in as overwritten_in
from ._stage import weights_of as weights_of
from ._stage import without_sown as without_sown

__all__ = [
    "CircularPipeline",
    "Factory",
    "Pipeline",
    "PipelineBase",
    "check_unchanged",
    "create_nnx_pipeline",
    "create_pipeline",
    "name_of",
    "one_stage",
    "overwritten_in",
    "weights_of",
    "without_sown",
]
