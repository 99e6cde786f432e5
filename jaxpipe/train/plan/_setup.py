"""A run, ready to be compiled: what its config and devices decide, as a record for each part."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax.sharding import Mesh

from ...api import PipelinedModel
from ...engines import Engine, PipelineSpec
from ...schedules import Timeline
from ..config._config import Config
from ._devices import BatchPlan
from ._model import ModelPlan
from ._schedule_selection import stage_costs
from ._weight_plan import StatePlan


@dataclass(frozen=True, eq=False)
class StepPlan:
    """What the programs of a step are made of. Two plans are equal only if they are one.

    Attributes:
        pipe: The pipeline of the model.
        model: How the model's functions compute.
        state: The state that the step updates.
        batch: The batch that it reads.
    """

    pipe: PipelinedModel
    model: ModelPlan
    state: StatePlan
    batch: BatchPlan

    @property
    def engine(self) -> Engine:
        """Returns the engine."""
        return self.pipe.engine

    @cached_property
    def stored(self) -> dict[str, Any]:
        """Returns the shapes of weights as the pipeline stores them."""
        return self.pipe.shapes(self.state.weights.abstract_params)

    @property
    def groups(self) -> dict[str, Any]:
        """Returns the shapes of weights in the groups of engines: embed, stages and head."""
        stored = self.stored
        return {"embed": stored["embed"], "stages": stored["layers"].stages, "head": stored["head"]}

    @cached_property
    def pipeline(self) -> PipelineSpec:
        """Returns the specification of the pipeline that the engine is given."""
        layers = self.stored["layers"]
        return self.pipe.plan(layers.num_layers, layers.specs)

    @property
    def predicted_timeline(self) -> Timeline | None:
        """Returns the timeline of a step, if it has a pipeline; an F of a layer costs 10."""
        if not self.engine.pipelines:
            return None
        counts = tuple(map(len, self.pipeline.layout.stage_layer_ids))
        costs = stage_costs(counts, recomputes=self.model.remat.recomputes)
        return self.engine.timeline(self.pipeline, costs)


@dataclass(frozen=True)
class Setup:
    """A run as `set_up` returns it. Functions take the parts of it that they need.

    Attributes:
        config: The config that everything else is derived from.
        step: The parts of which the programs of a step are made.
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
    def pipeline(self) -> PipelineSpec:
        """Returns the specification of the pipeline that the engine is given."""
        return self.step.pipeline

    @property
    def state(self) -> StatePlan:
        """Returns the state that a step updates."""
        return self.step.state

    @property
    def batch(self) -> BatchPlan:
        """Returns the batch that a step reads."""
        return self.step.batch
