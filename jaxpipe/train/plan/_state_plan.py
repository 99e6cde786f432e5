"""The train state of a run: its weights, and the optimizer that updates them."""

from dataclasses import dataclass

import optax

from ..optim._factories import OptimizerKeys
from ..optim._optimizer import learning_rate_schedule
from ._weight_plan import WeightPlan


@dataclass(frozen=True)
class LearningRate:
    """The learning rate of every step.

    Attributes:
        peak: The largest learning rate.
        shape: One of `LEARNING_RATE_SHAPES`, such as `cosine`.
        warmup_fraction: Share of the steps that warm up.
        final_fraction: Share of the peak that is left after the last step.
        num_steps: Number of steps of the schedule, warmup included.
        follows_run: Whether they are as many as those of the run.
    """

    peak: float
    shape: str
    warmup_fraction: float
    final_fraction: float
    num_steps: int
    follows_run: bool = True

    def schedule(self, num_steps: int | None = None) -> optax.Schedule:
        """Builds the schedule."""
        return learning_rate_schedule(
            self.peak,
            num_steps=self.num_steps if num_steps is None else num_steps,
            warmup_fraction=self.warmup_fraction,
            final_fraction=self.final_fraction,
            shape=self.shape,
        )


@dataclass(frozen=True)
class OptimizerPlan:
    """The optimizer, and what is done to gradients before it and to updates after it.

    Attributes:
        learning_rate: The learning rate of every step.
        keys: The optimizer, its arguments and the decay of weights.
        weight_decay_exclude: Regular expressions of the names of weights that do not decay.
        gradient_clipping_threshold: The largest norm of gradients; 0 for no limit.
        routed_bias_update_rate: The change of a router's biases in a step.
        skip_bad_steps: Whether a step changes nothing if its loss or norm is not usable.
        max_gradient_norm: The largest norm of a usable step; 0 for no limit.
    """

    learning_rate: LearningRate
    keys: OptimizerKeys
    weight_decay_exclude: tuple[str, ...]
    gradient_clipping_threshold: float
    routed_bias_update_rate: float
    skip_bad_steps: bool
    max_gradient_norm: float


@dataclass(frozen=True)
class StatePlan:
    """The state that a step updates.

    Attributes:
        init_seed: The seed of the first weights.
        zero1: Whether the optimizer's state is divided over `data` too.
    """

    weights: WeightPlan
    optimizer: OptimizerPlan
    init_seed: int
    zero1: bool
