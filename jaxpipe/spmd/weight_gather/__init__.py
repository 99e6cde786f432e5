"""When and how the weights of stages are gathered, and their gradients reduce-scattered."""

from ._gather import EACH_TICK as EACH_TICK
from ._gather import Gather as Gather
from ._gather import When as When
from ._gather import gather_in_layers as gather_in_layers
from ._gather import gather_weights as gather_weights
from ._gather import identity as identity
from ._gather import layer_gather as layer_gather
from ._gather import only_after as only_after
from ._repeat_gather import RepeatGather as RepeatGather
from ._repeat_gather import repeat_gather as repeat_gather
