"""What the config's rematerialisation policy wraps: a tick of the pipeline, each layer, or both."""

from collections.abc import Iterable
from typing import Any

from ... import autodiff
from ..config._config import Config


def tick_remat(config: Config) -> autodiff.Remat:
    """What wraps the stage of a tick."""
    wanted = config.set_remat_policy_on_pipeline_iterations
    return _remat(config) if wanted else autodiff.keep


def layer_remat(config: Config) -> autodiff.Remat:
    """What wraps a layer. Without a pipeline there is nothing else to wrap."""
    wanted = config.set_remat_policy_on_layers_per_stage or config.pipeline_engine == "none"
    return _remat(config) if wanted else autodiff.keep


def outer_layer_remat(config: Config) -> autodiff.Remat:
    """What wraps a layer before or after the stages, where engines recompute nothing."""
    return _remat(config)


def check_remat(config: Config, devices: Iterable[Any]) -> None:
    """Checks that `devices` have the memory that the policy offloads to.

    Raises:
        ValueError: If they have not.
    """
    autodiff.check_offload(config.remat_policy, _tensor_locations(config), devices)


def _remat(config: Config) -> autodiff.Remat:
    return autodiff.remat_by_name(config.remat_policy, _tensor_locations(config))


def _tensor_locations(config: Config) -> dict[str, str]:
    return {tensor: getattr(config, tensor) for tensor in autodiff.TENSORS}
