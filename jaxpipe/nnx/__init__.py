"""Pipelines of Flax NNX layers: `create_pipeline(config, layers, mesh)` is an NNX module."""

from ._pipeline import CircularPipeline as CircularPipeline
from ._pipeline import Pipeline as Pipeline
from ._pipeline import PipelineBase as PipelineBase
from ._pipeline import create_pipeline as create_pipeline
