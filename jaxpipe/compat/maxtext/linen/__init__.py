"""MaxText's pipeline in Linen: `create_pipeline(config, layers, mesh)`."""

from ._pipeline import CircularPipeline as CircularPipeline
from ._pipeline import Pipeline as Pipeline
from ._pipeline import PipelineBase as PipelineBase
from ._pipeline import create_pipeline as create_pipeline
