"""What a run tells its engine about the pipeline."""

from functools import partial

from ...engines import ENGINES, Engine
from ...engines._engine import PipelinePlan
from ._fsdp import weight_gathers
from ._rematerialization import tick_remat
from ._setup import Setup

_UNPIPELINED = {"none": "unpipelined"}
"""Names of engines in `pipeline_engine` that differ from those of the records."""


def engine_of(setup: Setup) -> Engine:
    """Returns the engine that `pipeline_engine` names."""
    name = setup.config.pipeline_engine
    return ENGINES[_UNPIPELINED.get(name, name)]


def pipeline_plan(setup: Setup) -> PipelinePlan:
    """Returns the plan of a run's pipeline.

    Args:
        setup: The run.

    Returns:
        The plan, with the gathers of the model's logical axes.
    """
    config, selection = setup.config, setup.schedule_selection
    return PipelinePlan(
        mesh=setup.mesh,
        layout=setup.layout,
        num_microbatches=setup.num_microbatches,
        schedule=None if selection is None else selection.schedule,
        ticks=None if selection is None else selection.ticks,
        remat=tick_remat(config),
        forwarding_delay=config.pipeline_delay_activation_forwarding,
        gathers=partial(weight_gathers, setup),
        vocab_parallel=config.pipeline_vocab_parallel,
        scan_repeats=config.scan_pipeline_repeats,
        scan_ticks=config.scan_pipeline_iterations,
    )
