"""What a run tells its engine about the pipeline."""

from functools import partial

from ...engines._engine import PipelinePlan
from ._fsdp import weight_gathers
from ._rematerialization import tick_remat
from ._setup import Setup


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
