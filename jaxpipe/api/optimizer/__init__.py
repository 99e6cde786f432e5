"""Runs optimizers that see the user's tree on stored parameters, and stores their state."""

from ._optimizer import Optimizer as Optimizer
from ._optimizer import state_shapes as state_shapes
from ._optimizer import traced as traced
from ._optimizer import transformation as transformation
from ._parts import num_lead_dims as num_lead_dims
from ._state import StoredState as StoredState
from ._state import shard_state as shard_state
from ._state import unshard_state as unshard_state
