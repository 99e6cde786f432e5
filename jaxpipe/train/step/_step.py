"""The train step: from a state and a batch to the next state and metrics.

Either one program runs it on all devices, or every rank runs programs of its own: two ways with one
contract, between which the record of the engine decides.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import PyTree

from ... import mpmd
from ..plan._setup import StepPlan
from ._mpmd import (
    compiled_mpmd_train_step,
    init_mpmd_state,
    make_mpmd_eval_step,
    make_mpmd_train_step,
    mpmd_state_shardings,
)
from ._one_program import init_stacked_state, make_eval, make_stacked_train_step
from ._state import TrainState, state_shardings

StepMetrics = Mapping[str, jax.Array | mpmd.MpmdArray]
"""The loss and other metrics of a batch, which may not be computed yet."""

TrainStep = Callable[[TrainState, PyTree], tuple[TrainState, dict[str, Any]]]


@dataclass(frozen=True)
class _Programs:
    """The programs of a step, as functions of its plan.

    Attributes:
        init: Returns the first state, on the devices that hold it.
        shardings: Returns the sharding of every leaf of a state.
        train_step: Returns `(state, batch) -> (state, metrics)`.
        compile: Compiles what `train_step` returned, for a state and a batch.
        eval_step: Returns `(weights, batch) -> metrics`.
        context: Returns the context in which they run.
    """

    init: Callable[[StepPlan], TrainState]
    shardings: Callable[[StepPlan], PyTree]
    train_step: Callable[[StepPlan], TrainStep]
    compile: Callable[[StepPlan, Any, TrainState, PyTree], object]
    eval_step: Callable[[StepPlan], Callable[[PyTree, PyTree], StepMetrics]]
    context: Callable[[StepPlan], AbstractContextManager]


_ONE = _Programs(
    init=init_stacked_state,
    shardings=state_shardings,
    train_step=make_stacked_train_step,
    # JAX keeps the program for the calls with such arguments.
    compile=lambda plan, step, state, batch: step.lower(state, batch).compile(),
    eval_step=lambda plan: plan.pipe.jit(make_eval(plan)),
    context=lambda plan: jax.set_mesh(plan.pipeline.mesh),
)
_BY_RANK = _Programs(
    init=init_mpmd_state,
    shardings=mpmd_state_shardings,
    train_step=make_mpmd_train_step,
    compile=lambda plan, step, state, batch: compiled_mpmd_train_step(plan),
    eval_step=make_mpmd_eval_step,
    context=lambda plan: nullcontext(),
)


def _programs(plan: StepPlan) -> _Programs:
    return _BY_RANK if plan.engine.program_per_rank else _ONE


def init_state(plan: StepPlan) -> TrainState:
    """Initializes weights, optimizer state and step 0, each on the devices that hold it."""
    return _programs(plan).init(plan)


def stored_shardings(plan: StepPlan) -> PyTree:
    """Returns the sharding of every leaf of a state, `MpmdSharding` if ranks have programs."""
    return _programs(plan).shardings(plan)


def make_train_step(plan: StepPlan) -> TrainStep:
    """Builds the train step; it compiles at its first call, and donates the state."""
    return _programs(plan).train_step(plan)


def compile_ahead(plan: StepPlan, train_step: TrainStep, state: TrainState, batch: PyTree) -> None:
    """Compiles the train step, so that its first call takes no longer than others."""
    _programs(plan).compile(plan, train_step, state, batch)


def make_eval_step(plan: StepPlan) -> Callable[[PyTree, PyTree], StepMetrics]:
    """Builds the evaluation of one batch, forward only; it compiles at its first call."""
    return _programs(plan).eval_step(plan)


def mesh_context(plan: StepPlan) -> AbstractContextManager:
    """Returns the context in which the programs of a step run."""
    return _programs(plan).context(plan)
