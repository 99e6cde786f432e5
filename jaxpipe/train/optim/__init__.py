"""The optimizer, the learning rate, and which weights decay."""

from ._decay import weight_name as weight_name
from ._factories import build_optimizer as build_optimizer
from ._factories import factories as factories
from ._optimizer import clip_by_norm as clip_by_norm
from ._optimizer import gradient_norm as gradient_norm
from ._optimizer import learning_rate_schedule as learning_rate_schedule
from ._router_bias import drop_router_biases as drop_router_biases
