"""Pipelines of Flax NNX layers: `create_pipeline(config, layers, mesh)` is an NNX module."""

from ._pipeline import NNXCircularPipeline as CircularPipeline
from ._pipeline import NNXPipeline as Pipeline
from ._pipeline import NNXPipelineBase as PipelineBase
from ._pipeline import create_pipeline as create_pipeline

__all__ = ["CircularPipeline", "Pipeline", "PipelineBase", "create_pipeline"]
