"""NNX: `model` is for `jaxpipe.pipeline`, and `create_pipeline(config, layers, mesh)` a layer."""

from ._model import model as model
from ._pipeline import NNXCircularPipeline as CircularPipeline
from ._pipeline import NNXPipeline as Pipeline
from ._pipeline import NNXPipelineBase as PipelineBase
from ._pipeline import create_pipeline as create_pipeline

__all__ = ["CircularPipeline", "Pipeline", "PipelineBase", "create_pipeline", "model"]
