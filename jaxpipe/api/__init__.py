"""The front door: a model as functions of one layer, and its pipeline under any schedule."""

from ._flops import layer_flops as layer_flops
from ._flops import one_of_each_kind as one_of_each_kind
from ._layouts import counts_by_cost as counts_by_cost
from ._losses import Weighted as Weighted
from ._model import Model as Model
from ._packed_x import layer_with_weights as layer_with_weights
from ._packed_x import x_of_layers as x_of_layers
from ._params import NumLayers as NumLayers
from ._pipeline import pipeline as pipeline
from ._pipelined_model import PipelinedModel as PipelinedModel
from ._vocab_parallel import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
