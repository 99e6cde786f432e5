"""NNX: `model` is for `jaxpipe.pipeline`; `create_nnx_pipeline` makes MaxText's pipeline."""

from ..compat.maxtext.nnx import CircularPipeline as CircularPipeline
from ..compat.maxtext.nnx import Pipeline as Pipeline
from ..compat.maxtext.nnx import PipelineBase as PipelineBase
from ..compat.maxtext.nnx import create_nnx_pipeline as create_nnx_pipeline
from ..compat.maxtext.nnx import create_pipeline as create_pipeline
from ._model import model as model
