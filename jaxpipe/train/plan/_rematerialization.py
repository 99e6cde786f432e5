"""The config's rematerialisation policy, applied to a tick of the pipeline, to a layer, or both."""

from collections.abc import Mapping
from dataclasses import dataclass

from ... import autodiff


@dataclass(frozen=True)
class RematPlan:
    """What forwards store for backwards, and what is computed again.

    Attributes:
        policy: The name of the policy, as `autodiff.remat_by_name` takes it.
        locations: The location of each tensor, for the policy `custom`.
        on_ticks: Whether the policy is applied to the stage that a tick runs.
        on_layers: Whether it is applied to every layer.
    """

    policy: str
    locations: Mapping[str, str]
    on_ticks: bool
    on_layers: bool

    @property
    def recomputes(self) -> bool:
        """Returns whether backwards compute anything again."""
        return self.policy != "none"

    @property
    def tick(self) -> autodiff.Remat:
        """Returns the rematerialisation of the stage that a tick runs."""
        return self.outer_layer if self.on_ticks else autodiff.keep

    @property
    def layer(self) -> autodiff.Remat:
        """Returns the rematerialisation of a layer of a stage."""
        return self.outer_layer if self.on_layers else autodiff.keep

    @property
    def outer_layer(self) -> autodiff.Remat:
        """Returns that of layers outside of stages, which engines never recompute."""
        return autodiff.remat_by_name(self.policy, self.locations)
