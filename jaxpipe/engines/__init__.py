"""The engines, one record each: to add one, write its file and name its record in `ENGINES`."""

from typing import get_args as _get_args

from ..schedules import Schedule as _Schedule
from ..spmd import NO_OPTIONS as NO_OPTIONS
from ..spmd import EngineOptions as EngineOptions
from ..spmd import check_reduce_dtype as check_reduce_dtype
from ._accumulation import with_calls as _with_calls
from ._circular import CIRCULAR as _CIRCULAR
from ._engine import Engine as Engine
from ._engine import OwnSchedule as OwnSchedule
from ._engine import ParamSpecs as ParamSpecs
from ._engine import PipelineSpec as PipelineSpec
from ._engine import When as When
from ._jit import adding_in_products as adding_in_products
from ._kinds import common_sequence as common_sequence
from ._kinds import with_kinds as _with_kinds
from ._memory import LIVE as LIVE
from ._memory import Buffers as Buffers
from ._memory import PeakMemory as PeakMemory
from ._memory import Sharded as Sharded
from ._memory import StepCounts as StepCounts
from ._memory import StepSizes as StepSizes
from ._memory import loss_bytes as loss_bytes
from ._mpmd import MPMD as _MPMD
from ._scheduled import SCHEDULED as _SCHEDULED
from ._unpipelined import UNPIPELINED as _UNPIPELINED
from ._unpipelined import most_bytes_for_several as most_bytes_for_several
from ._unpipelined import most_bytes_for_several_of as most_bytes_for_several_of
from ._vocab_parallel import loss_on_ranks as loss_on_ranks

ENGINES: dict[str, Engine] = {
    engine.name: _with_calls(_with_kinds(engine))
    for engine in (_UNPIPELINED, _CIRCULAR, _SCHEDULED, _MPMD)
}
"""Every engine by its name."""

CONFIG_ENGINES: dict[str, Engine] = {engine.config_name: engine for engine in ENGINES.values()}
"""Every engine by its name in configs, as `pipeline_engine` has it."""


def engine_of_any_schedule() -> Engine:
    """Returns the engine that runs any schedule in one program."""
    return next(engine for engine in ENGINES.values() if engine.runs_ticks)


def usual_engine(schedule: str | _Schedule | None) -> Engine:
    """Selects the engine of a schedule, for users who do not say which.

    Args:
        schedule: The name of a family, a schedule, or None for no pipeline.

    Returns:
        An engine of one program: that whose own schedule it is, or else one that runs any.
    """
    for engine in ENGINES.values():
        if schedule is None and not engine.pipelines:
            return engine
        if engine.own_schedule is not None and engine.own_schedule.family == schedule:
            return engine
    return engine_of_any_schedule()


def select_engine(name: str, schedule: str | _Schedule | None) -> Engine:
    """Returns the engine that a user names.

    Args:
        name: The name of an engine, or "auto".
        schedule: The name of a family, a schedule, or None for no pipeline.

    Returns:
        The engine of this name; of "auto" the usual one of the schedule.

    Raises:
        ValueError: If there is none of this name.
    """
    if name == "auto":
        return usual_engine(schedule)
    if name not in ENGINES:
        raise ValueError(f"`engine` is {name!r}. Give 'auto' or one of {', '.join(ENGINES)}.")
    return ENGINES[name]


def check_gather(gather: When | None) -> When | None:
    """Checks when weights are gathered.

    Args:
        gather: A name, or None for an engine's usual way.

    Returns:
        The same.

    Raises:
        ValueError: If it is none of the names.
    """
    if gather not in (None, *_get_args(When)):
        names = ", ".join(map(repr, _get_args(When)))
        raise ValueError(f"`gather` is {gather!r}. Give one of {names}.")
    return gather
