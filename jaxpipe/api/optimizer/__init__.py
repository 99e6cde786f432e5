"""Runs optimizers that see the user's tree on stored parameters, and stores their state."""

from ._convert import shard_state as shard_state
from ._convert import unshard_state as unshard_state
from ._parts import num_lead_dims as num_lead_dims
from ._state import StoredState as StoredState
from ._transformation import Optimizer as Optimizer
from ._transformation import state_shapes as state_shapes
from ._transformation import traced as traced
from ._transformation import transformation as transformation
