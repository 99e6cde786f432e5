"""A run, ready to be compiled: what its config and devices decide, as a record for each part."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from jax.sharding import Mesh

from ...autodiff import StagedModel
from ...engines import Engine, PipelinePlan
from ...schedules import language
from ..config._config import Config
from ._devices import BatchPlan
from ._model import ModelPlan, build_model
from ._state_plan import StatePlan


@dataclass(frozen=True)
class FlaxFrontend:
    """The Flax modules that run in the pipeline in place of the model's functions.

    Attributes:
        is_nnx: Whether they are NNX's, not Linen's.
        fields: The fields that `create_pipeline` reads.
    """

    is_nnx: bool
    fields: SimpleNamespace


def import_flax_decoder() -> Any:
    """Imports the module `_flax_decoder`, which needs Flax.

    Raises:
        ValueError: If Flax is not installed.
    """
    try:
        from . import _flax_decoder
    except ImportError as error:
        raise ValueError(
            "`enable_nnx` is set, which needs Flax, and it cannot be imported "
            f'({error}). `pip install "jaxpipe[flax]"`, or leave `enable_nnx` at null.'
        ) from error
    return _flax_decoder


@dataclass(frozen=True, eq=False)
class StepPlan:
    """What the programs of a step are made of. Two plans are equal only if they are one.

    Attributes:
        engine: The engine.
        pipeline: What the engine is told about the pipeline.
        model: How the model's functions compute.
        frontend: The Flax modules that run in the pipeline; None for the model's own functions.
        state: The state that the step updates.
        batch: The batch that it reads.
        dropout_seed: The seed of dropout keys; None without dropout.
        compiler_options: XLA's options by name, as `jax.jit` takes them.
        timeout_seconds: Seconds without progress after which ranks of several programs give up.
    """

    engine: Engine
    pipeline: PipelinePlan
    model: ModelPlan
    frontend: FlaxFrontend | None
    state: StatePlan
    batch: BatchPlan
    dropout_seed: int | None
    compiler_options: Mapping[str, str]
    timeout_seconds: float

    def build_model(self) -> StagedModel:
        """Builds the model as the engine runs it."""
        return build_model(self.model, self.state.weights, self.engine, self.pipeline)

    @property
    def num_slices(self) -> int:
        """Returns the number of slices of each sequence that the schedule runs one by one."""
        schedule = self.pipeline.schedule
        return 1 if schedule is None else language.num_slices(schedule)


@dataclass(frozen=True)
class Setup:
    """A run as `set_up` returns it. Functions take the parts of it that they need.

    Attributes:
        config: The config that everything else is derived from.
        step: What the programs of a step are made of.
        schedule_reason: One line that says why a schedule was selected; None for an engine that
            runs a single one.
    """

    config: Config
    step: StepPlan
    schedule_reason: str | None

    @property
    def mesh(self) -> Mesh:
        """Returns the mesh of all devices."""
        return self.step.pipeline.mesh

    @property
    def pipeline(self) -> PipelinePlan:
        """Returns what the engine is told about the pipeline."""
        return self.step.pipeline

    @property
    def state(self) -> StatePlan:
        """Returns the state that a step updates."""
        return self.step.state

    @property
    def batch(self) -> BatchPlan:
        """Returns the batch that a step reads."""
        return self.step.batch
