"""When and how the weights of stages are gathered, and their gradients reduce-scattered."""

import typing

from ... import _lazy

if typing.TYPE_CHECKING:
    from ._gather import EACH_TICK as EACH_TICK
    from ._gather import Gather as Gather
    from ._gather import When as When
    from ._gather import axis_in_two_steps as axis_in_two_steps
    from ._gather import constrain_by as constrain_by
    from ._gather import gather_by_constraints as gather_by_constraints
    from ._gather import gather_by_specs as gather_by_specs
    from ._gather import gather_weights as gather_weights
    from ._gather import join_gathers as join_gathers
    from ._gather import only_after as only_after
    from ._gather import specs_of as specs_of
    from ._gather import unsharded_specs as unsharded_specs
    from ._per_layer import as_stored_on_gpus as as_stored_on_gpus
    from ._per_layer import gather_in_layers as gather_in_layers
    from ._per_layer import gathering_layer as gathering_layer
    from ._per_layer import layer_gather as layer_gather
    from ._weight_gather import WeightGather as WeightGather
    from ._weight_gather import read_after as read_after
    from ._weight_gather import weight_gather as weight_gather
else:
    __getattr__, __dir__, __all__ = _lazy.names(__name__)
