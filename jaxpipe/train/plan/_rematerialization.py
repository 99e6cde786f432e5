"""The config's rematerialisation policy, applied to a tick of the pipeline, to a layer, or both."""

from collections.abc import Iterable
from typing import Any

from ... import autodiff
from ...autodiff.backward import TENSORS, check_offload
from ..config._config import Config


def tick_remat(config: Config) -> autodiff.Remat:
    """Returns the rematerialisation of the stage that a tick runs."""
    wanted = config.set_remat_policy_on_pipeline_iterations
    return _remat(config) if wanted else autodiff.keep


def layer_remat(config: Config) -> autodiff.Remat:
    """Returns the rematerialisation of a layer; without a pipeline it is the config's policy."""
    wanted = config.set_remat_policy_on_layers_per_stage or not config.engine.pipelines
    return _remat(config) if wanted else autodiff.keep


def outer_layer_remat(config: Config) -> autodiff.Remat:
    """Returns the rematerialisation of layers outside of stages, which engines never recompute."""
    return _remat(config)


def check_remat(config: Config, devices: Iterable[Any]) -> None:
    """Checks that all `devices` have the memory that the policy of `config` offloads to.

    Raises:
        ValueError: If a device has no such memory.
    """
    check_offload(config.remat_policy, _tensor_locations(config), devices)


def _remat(config: Config) -> autodiff.Remat:
    return autodiff.remat_by_name(config.remat_policy, _tensor_locations(config))


def _tensor_locations(config: Config) -> dict[str, str]:
    return {tensor: getattr(config, tensor) for tensor in TENSORS}
