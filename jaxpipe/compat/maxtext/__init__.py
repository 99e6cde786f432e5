"""The names of MaxText's `maxtext.layers.pipeline`: pipelines of a stage in Linen or NNX.

Example:
    >>> from jaxpipe.compat import maxtext as pipeline
    >>> pipeline.create_pipeline.__module__
    'jaxpipe.compat.maxtext.linen._pipeline'
"""

from .linen import CircularPipeline as CircularPipeline
from .linen import Pipeline as Pipeline
from .linen import create_pipeline as create_pipeline
from .nnx import CircularPipeline as NNXCircularPipeline
from .nnx import Pipeline as NNXPipeline
from .nnx import PipelineBase as PipelineBase
from .nnx import create_nnx_pipeline as create_nnx_pipeline

__all__ = [
    "CircularPipeline",
    "NNXCircularPipeline",
    "NNXPipeline",
    "Pipeline",
    "PipelineBase",
    "create_nnx_pipeline",
    "create_pipeline",
]
