"""The train state of a run: its weights, and the optimizer that updates them."""

from dataclasses import dataclass

from ..config._config import Config
from ._weight_plan import WeightPlan


@dataclass(frozen=True)
class StatePlan:
    """The state that a step updates.

    Attributes:
        config: The keys of the run, among them those of the optimizer.
    """

    weights: WeightPlan
    config: Config
