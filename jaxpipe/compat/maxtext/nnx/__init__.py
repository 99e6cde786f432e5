"""MaxText's pipeline in NNX: `create_pipeline(config, layers, mesh)`."""

from ._layer import check_unchanged as check_unchanged
from ._layer import weights_of as weights_of
from ._pipeline import NNXCircularPipeline as CircularPipeline
from ._pipeline import NNXPipeline as Pipeline
from ._pipeline import NNXPipelineBase as PipelineBase
from ._pipeline import create_pipeline as create_pipeline

__all__ = [
    "CircularPipeline",
    "Pipeline",
    "PipelineBase",
    "check_unchanged",
    "create_pipeline",
    "weights_of",
]
