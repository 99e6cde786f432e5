"""The steps of a run: batches, evaluations and checkpoints at their times."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import jax
from jaxtyping import PyTree

from ...data.batches import Batches
from ..config._config import Config
from ..estimate._step_metrics import StepWork, memory_metrics, speed_metrics
from ..logs._profile import BeforeStep
from ..plan._setup import StepPlan
from ..runtime._multihost import barrier
from ..runtime._stop import ShouldStop
from ..step._evaluate import Evaluate
from ..step._mpmd import trace_mpmd_train_step
from ..step._shard_batch import shard_batch_of_step
from ..step._state import TrainState
from ..step._step import StepMetrics, TrainStep, compile_ahead, make_train_step

Metrics = dict[str, float]

Save = Callable[[int, TrainState, Metrics], Callable[[], TrainState]]
"""Saves a checkpoint, which consumes the state. Returns a function that gives the state back."""

ShowSample = Callable[[int, TrainState], TrainState]
"""Shows a sample of a step, which consumes the state. Returns the same state."""

Compiling = Callable[[], AbstractContextManager[None]]


def run_steps(
    plan: StepPlan,
    config: Config,
    state: TrainState,
    done: int,
    batch_at: Batches,
    *,
    work: StepWork,
    write_trace: Callable[[int, str], None] = lambda step, trace: None,
    save: Save | None = None,
    before: BeforeStep = lambda step, previous: None,
    should_stop: ShouldStop = lambda step: False,
    evaluate: Evaluate | None = None,
    show_sample: ShowSample | None = None,
    is_best: Callable[[float], bool] = lambda loss: False,
    is_due: Callable[[int], bool] = lambda step: False,
    enter: Callable[[int, str], None] = lambda step, phase: None,
    compiling: Compiling = nullcontext,
) -> Iterator[tuple[int, Metrics]]:
    """Runs the steps `done + 1` to `steps`.

    The host reads the metrics of a step while the next one runs. The next step waits only where an
    evaluation or a checkpoint is due. Metrics are yielded before the checkpoint is taken: a run
    that is killed during the checkpoint resumes with none of them missing.
    """
    train_step = make_train_step(plan)
    ended = time.perf_counter()
    previous: tuple[int, StepMetrics] | None = None
    for step in range(done + 1, config.steps + 1):
        enter(step, "data")
        before(step, previous and previous[1])
        batch = shard_batch_of_step(plan.batch, batch_at, step - 1)
        is_traced = step == config.mpmd_trace_step
        enter(step, "traced step" if is_traced else "step")
        if step == done + 1:
            ended += _compile_everywhere(compiling, plan, train_step, state, batch)
        if is_traced:
            state, metrics, trace = trace_mpmd_train_step(plan, state, batch)
            write_trace(step, trace)
        else:
            state, metrics = train_step(state, batch)
        if previous is not None:
            ended, values = _wait_for_metrics(plan, work, previous[1], ended)
            yield previous[0], values
        previous = step, metrics
        is_stopped, is_last = should_stop(step), step == config.steps
        saves = is_stopped or is_last or step % config.checkpoint_period == 0 or is_due(step)
        # Who is stopped has little time, and needs it for the checkpoint.
        evaluates = evaluate and not is_stopped and (is_last or step % config.eval_interval == 0)
        if saves or evaluates:
            ended, values = _wait_for_metrics(plan, work, metrics, ended)
            if evaluate and evaluates:
                enter(step, "evaluation")
                values |= evaluate(state)
                ended = time.perf_counter()
                saves = is_best(values["eval_loss"]) or saves
            yield step, values
            if show_sample and evaluates:
                enter(step, "sample")
                state = show_sample(step, state)
                ended = time.perf_counter()
            if saves and save:
                enter(step, "checkpoint")
                from_canonical = save(step, state, values)
                state = state if is_stopped or is_last else from_canonical()
            previous = None
        if is_stopped:
            return


def _compile_everywhere(
    compiling: Compiling, plan: StepPlan, train_step: TrainStep, state: TrainState, batch: PyTree
) -> float:
    """Compiles in this process and waits for the others. Returns the seconds that it took."""
    started = time.perf_counter()
    with compiling():
        compile_ahead(plan, train_step, state, batch)
        barrier("compiled")
    return time.perf_counter() - started


def _wait_for_metrics(
    plan: StepPlan, work: StepWork, metrics: StepMetrics, started: float
) -> tuple[float, Metrics]:
    """Waits for a step. Returns the time when it ended, in seconds, and its metrics, loss first."""
    values = {name: float(x) for name, x in jax.device_get(metrics).items()}
    ended = time.perf_counter()
    speed = speed_metrics(work, ended - started)
    memory = memory_metrics(plan.batch.devices.mesh.local_devices)
    return ended, {"loss": values.pop("loss"), **values, **speed, **memory}
