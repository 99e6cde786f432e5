"""Builds the state of a training run, and the step that updates it."""

import typing

from ... import _lazy

if typing.TYPE_CHECKING:
    from ._aot import check_single_program as check_single_program
    from ._aot import compile_train_step as compile_train_step
    from ._aot import does_not_fit as does_not_fit
    from ._aot import report_train_step as report_train_step
    from ._evaluate import make_evaluate as make_evaluate
    from ._mpmd import lower_train_step as lower_train_step
    from ._one_program import make_value_and_grad as make_value_and_grad
    from ._shard_batch import shard_batch as shard_batch
    from ._shard_batch import shard_batch_of_step as shard_batch_of_step
    from ._state import TrainState as TrainState
    from ._state import state_shapes as state_shapes
    from ._state import state_shardings as state_shardings
    from ._step import compile_ahead as compile_ahead
    from ._step import init_state as init_state
    from ._step import make_eval_step as make_eval_step
    from ._step import make_train_step as make_train_step
    from ._step import mesh_context as mesh_context
    from ._step import stored_shardings as stored_shardings
else:
    __getattr__, __dir__, __all__ = _lazy.names(__name__)
