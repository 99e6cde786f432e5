"""The keys of a run that a layout stands for, and the run that they set up."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ...kernels import for_heads_up_to
from ...models import PRESETS
from ...planner import OFFLOAD_INPUTS, PreparedPipeline, StepLayout, Values
from ...sharding import AXES
from ...xla.compile_report import CompileReport
from ..config import key_defaults
from ..config._config import Config
from ..config._keys import GATHER_KEYS, OPTION_KEYS
from ..plan._from_config import set_up
from ..plan._setup import StepPlan
from ..step._aot import check_single_program, report_train_step

AXIS_KEYS = {axis: "pipeline" if axis == "stage" else axis for axis in AXES}
"""The name of each mesh axis in keys such as `ici_pipeline_parallelism`."""


@dataclass(frozen=True)
class TrainerSource:
    """A model of the trainer: layouts are keys of a run.

    Attributes:
        values: Values of keys that no layout changes.
        num_slices: The number of slices of TPUs.
        widest_head: The most channels of a head that cuDNN has there; None if they are no GPUs.
    """

    values: Values
    num_slices: int
    widest_head: int | None
    is_own = False

    def settings(self, candidate: StepLayout) -> Values:
        """Returns the values of keys: those that are passed on, and those that a layout decides."""
        settings = self.values | _keys(candidate, self.num_slices)
        if candidate.sizes["tensor"] == 1:
            settings.pop("sequence_parallel", None)
        return settings

    def prepare(self, candidate: StepLayout, devices: Sequence[Any]) -> PreparedPipeline:
        """Sets up the run of a layout by the checks of the trainer and no others."""
        with for_heads_up_to(self.widest_head):
            step = _set_up(self.settings(candidate), devices)
        return PreparedPipeline(step.engine, step.pipeline)

    def compile(self, settings: Values, num_rows: int, devices: Sequence[Any]) -> CompileReport:
        """Compiles the train step of a run."""
        del num_rows
        step = _set_up(settings, devices)
        check_single_program(step.engine)
        return report_train_step(step)[0]

    def pipeline(self, settings: Values, devices: Sequence[Any]) -> NoReturn:
        """Raises a `ValueError`: `jaxpipe train` runs the model."""
        del devices
        raise ValueError(
            f"The model is {settings.get('model_name', 'of a config')}, which `jaxpipe train` "
            "runs. `yaml` returns the keys of a plan; `jaxpipe.train` takes them too."
        )


def _set_up(settings: Values, devices: Sequence[Any]) -> StepPlan:
    base = key_defaults()
    preset = PRESETS[settings.get("model_name", base["model_name"])]
    return set_up(Config(**{**base, **preset, **settings}), devices).step


def _keys(candidate: StepLayout, num_slices: int) -> Values:
    """Returns the keys that a layout decides."""
    values = _mesh(candidate, num_slices)
    values["pipeline_engine"] = candidate.engine_name
    values["num_pipeline_microbatches"] = candidate.microbatches
    values["remat_policy"] = candidate.policy
    if candidate.policy == OFFLOAD_INPUTS:
        values |= {"remat_policy": "custom", "decoder_layer_input": "offload"}
    if candidate.accumulation > 1:
        values["gradient_accumulation_steps"] = candidate.accumulation
    if candidate.vocab_tiling > 1:
        values["num_vocab_tiling"] = candidate.vocab_tiling
    if candidate.whole_experts:
        values["shard_exp_on_fsdp"] = True
    values |= {OPTION_KEYS[name]: value for name, value in candidate.options.changed.items()}
    if not candidate.engine.pipelines:
        return values
    values["set_remat_policy_on_pipeline_iterations"] = candidate.scope != "layer"
    values["set_remat_policy_on_layers_per_stage"] = candidate.scope != "tick"
    if candidate.gather in GATHER_KEYS:
        values[GATHER_KEYS[candidate.gather]] = True
    if not candidate.engine.runs_schedules:
        values["num_layers_per_pipeline_stage"] = candidate.layers_per_stage
        return values
    values["pipeline_schedule"] = candidate.schedule
    if len(set(candidate.counts)) > 1:
        values["pipeline_layout"] = _layout_text(candidate.counts)
    elif candidate.chunks > 1:
        values["num_pipeline_repeats"] = candidate.chunks
    return values


def _mesh(candidate: StepLayout, num_slices: int) -> Values:
    """Returns the sizes of the mesh inside a slice and across slices."""
    axis_sizes: Values = {}
    for axis, size in zip(AXES, candidate.mesh, strict=True):
        across = num_slices if axis == candidate.across else 1
        axis_sizes[f"ici_{AXIS_KEYS[axis]}_parallelism"] = size // across
        if across > 1:
            axis_sizes[f"dcn_{AXIS_KEYS[axis]}_parallelism"] = across
    return axis_sizes


def _layout_text(counts: Sequence[int]) -> str:
    """Returns the layers of every stage as the value of `pipeline_layout`.

    Example:
        >>> _layout_text((1, 2, 1))
        'Et|t*2|tL'
    """
    stages = ["t" if count == 1 else f"t*{count}" if count else "" for count in counts]
    return f"E{'|'.join(stages)}L"
