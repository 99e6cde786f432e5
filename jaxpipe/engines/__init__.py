"""The engines, one record each: to add one, write its file and name its record in `ENGINES`."""

from ._accumulation import gradient_accumulation as gradient_accumulation
from ._accumulation import with_calls as _with_calls
from ._circular import CIRCULAR as _CIRCULAR
from ._engine import Engine as Engine
from ._engine import ParamSpecs as ParamSpecs
from ._engine import PipelinePlan as PipelinePlan
from ._engine import When as When
from ._kinds import with_kinds as _with_kinds
from ._mpmd import MPMD as _MPMD
from ._scheduled import SCHEDULED as _SCHEDULED
from ._unpipelined import UNPIPELINED as _UNPIPELINED
from ._vocab_parallel import loss_on_ranks as loss_on_ranks

ENGINES: dict[str, Engine] = {
    engine.name: _with_calls(_with_kinds(engine))
    for engine in (_UNPIPELINED, _CIRCULAR, _SCHEDULED, _MPMD)
}
"""Every engine by its name."""
