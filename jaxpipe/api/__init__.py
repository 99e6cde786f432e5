"""The front door: a model as functions of one layer, and its pipeline under any schedule."""

from ._layouts import layer_flops as layer_flops
from ._losses import Weighted as Weighted
from ._model import Model as Model
from ._pipeline import pipeline as pipeline
from ._pipelined_model import PipelinedModel as PipelinedModel
from ._vocab_parallel import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
