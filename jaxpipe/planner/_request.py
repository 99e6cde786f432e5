"""A request: the model and the devices that a plan is for, and what of a layout is given.

Where the model is from decides what the settings of a plan are called, and who checks them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple, Protocol

from ..api import PipelinedModel
from ..cost.work import ModelWork
from ..engines import Engine, PipelineSpec
from ..kernels import LARGEST_STORED
from ..xla.compile_report import CompileReport
from ._candidates import Space, StepLayout
from ._devices import Devices
from ._model import PlannedModel, token_bytes

Values = dict[str, Any]

MANY_SCORES = f"more than {LARGEST_STORED / 2**30:.0f} GiB of scores of a layer on a device"
"""The scores that attention may not store, in words."""


class PreparedPipeline(NamedTuple):
    """A pipeline as its engine runs it.

    Attributes:
        engine: The engine that runs it.
        pipeline: The pipeline as the engine is told it.
    """

    engine: Engine
    pipeline: PipelineSpec


class ModelSource(Protocol):
    """The origin of a model: a user (`OwnSource`), or the keys of a run (`TrainerSource`)."""

    @property
    def is_own(self) -> bool:
        """True for a model of a user's functions."""
        ...

    def settings(self, candidate: StepLayout) -> Values:
        """Returns the settings of a layout, by name."""
        ...

    def prepare(self, candidate: StepLayout, devices: Sequence[Any]) -> PreparedPipeline:
        """Sets up a layout with all checks; raises a `ValueError` if it is refused."""
        ...

    def compile(self, settings: Values, num_rows: int, devices: Sequence[Any]) -> CompileReport:
        """Compiles the train step of the settings of a layout."""
        ...

    def pipeline(self, settings: Values, devices: Sequence[Any]) -> PipelinedModel:
        """Returns the pipeline of the settings of a layout."""
        ...


@dataclass(frozen=True, eq=False)
class Request:
    """The model, the devices and the keys that a plan is for.

    Attributes:
        devices: The devices of the run.
        batch: Sequences of a step.
        sequence: Tokens of a sequence.
        limit: Bytes of memory that a plan may use on a device.
        model: The model's sizes that decide memory.
        work: The work of the model per token.
        source: The origin of the model, which knows what a layout is called there.
        space: The sizes and limits from which candidates are made.
        before: Layers before those of the pipeline, which run with the embedding.
        after: Layers after them, which run with the head.
        default_flags: Which of jaxpipe's own compiler flags a step is compiled with.
        most_scores: Bytes of attention's scores that a layer may store of a microbatch on a device.
        leaner: Makes the model as it is with other keys, which change what is trained: pairs of the
            keys and its sizes.
    """

    devices: Devices
    batch: int
    sequence: int
    limit: float
    model: PlannedModel
    work: ModelWork
    source: ModelSource
    space: Space
    before: int = 0
    after: int = 0
    default_flags: Literal["all", "quick", "none"] = "all"
    most_scores: float = math.inf
    leaner: Callable[[], Sequence[tuple[str, PlannedModel]]] = tuple

    @property
    def checked_by(self) -> str:
        """Returns the name of what checks a layout last, for messages."""
        return "`jaxpipe.pipeline`" if self.source.is_own else "the trainer"

    def stores_many_scores(self, candidate: StepLayout) -> bool:
        """Returns whether a layer would store more scores of attention than the trainer allows."""
        of_token = token_bytes(self.model.scores, candidate.sizes, 4)
        return of_token * self.tokens(candidate) > self.most_scores

    def tokens(self, candidate: StepLayout) -> float:
        """Returns the tokens of a microbatch on a device."""
        rows = self.batch / candidate.accumulation / candidate.microbatches / candidate.num_shards
        return rows * self.sequence / candidate.sizes["context"]


def check_positive(**values: float | int) -> None:
    """Checks that values are above 0.

    Args:
        values: Values by the names that errors have for them.

    Raises:
        ValueError: If one is not, by its name.
    """
    for name, value in values.items():
        if not isinstance(value, Real) or value <= 0:
            raise ValueError(f"`{name}` is {value!r}. Give a number above 0.")
