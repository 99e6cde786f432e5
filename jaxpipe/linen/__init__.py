"""Linen: `model` is for `jaxpipe.pipeline`; `create_pipeline` makes MaxText's pipeline."""

from ..compat.maxtext.linen import CircularPipeline as CircularPipeline
from ..compat.maxtext.linen import Pipeline as Pipeline
from ..compat.maxtext.linen import PipelineBase as PipelineBase
from ..compat.maxtext.linen import create_pipeline as create_pipeline
from ._model import model as model
