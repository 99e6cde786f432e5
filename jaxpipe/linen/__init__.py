"""Linen: `model` is for `jaxpipe.pipeline`, and `create_pipeline(config, layers, mesh)` a layer."""

from ._model import model as model
from ._pipeline import CircularPipeline as CircularPipeline
from ._pipeline import Pipeline as Pipeline
from ._pipeline import PipelineBase as PipelineBase
from ._pipeline import create_pipeline as create_pipeline
