"""MaxText's circular pipeline as pure functions of one rank, and as a layer and an engine."""

import typing

from ... import _lazy

if typing.TYPE_CHECKING:
    from ._engine import circular as circular
    from ._engine import circular_value as circular_value
    from ._engine import circular_value_and_grad as circular_value_and_grad
    from ._loop_phases import LoopPhase as LoopPhase
    from ._loop_phases import run_repeats as run_repeats
    from ._loop_phases import run_ticks as run_ticks
    from ._passes import num_entries as num_entries
    from ._shape import Condition as Condition
    from ._shape import PipelineShape as PipelineShape
    from ._shape import StreamMove as StreamMove
    from ._shape import add_input as add_input
    from ._shape import check_circular as check_circular
    from ._shape import first_exit as first_exit
    from ._shape import first_state as first_state
    from ._shape import hand_over as hand_over
    from ._shape import last_cotangent as last_cotangent
    from ._shape import move_stream as move_stream
    from ._shape import next_input as next_input
    from ._shape import realign as realign
    from ._shape import roll_slots as roll_slots
    from ._shape import stream_move as stream_move
    from ._shape import take_back as take_back
    from ._shape import to_next_rank as to_next_rank
    from ._shape import work_at as work_at
    from ._shape import work_of_rank as work_of_rank
else:
    __getattr__, __dir__, __all__ = _lazy.names(__name__)
