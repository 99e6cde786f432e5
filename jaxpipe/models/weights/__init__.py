"""Abstract weights: the shape, logical axes and initializer of every leaf of a model."""

from ._abstract import Weight as Weight
from ._abstract import initialize as initialize
from ._abstract import initialize_layers as initialize_layers
from ._abstract import is_weight as is_weight
from ._abstract import logical_axes as logical_axes
from ._abstract import mask_padding_layers as mask_padding_layers
from ._abstract import num_parameters as num_parameters
from ._abstract import stack_weights as stack_weights
from ._abstract import weight_shapes as weight_shapes
