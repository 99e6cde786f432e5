"""The training loop: state, batches, metrics and checkpoints, step after step."""

import dataclasses
import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import yaml

from ... import mpmd
from ..._durable import write_file
from ...data.batches._batches import Batches
from ..checkpoint._canonical import (
    canonical_round_trip,
    canonical_shapes,
    state_from_canonical,
    with_layers_after,
)
from ..checkpoint._checkpoint_timer import CheckpointTimer
from ..checkpoint._init_from import check_same_sizes, first_state
from ..checkpoint._store import (
    best_loss_tracker,
    closing_checkpoints,
    open_checkpoints,
    read_metadata,
    restore_checkpoint,
    save_checkpoint,
)
from ..config._config import Config, parse_profile_steps
from ..estimate._device_flops import speed_metrics
from ..estimate._fits import check_fits
from ..logs._describe import describe
from ..logs._metrics import WriteMetrics, metrics_writer
from ..logs._profile import BeforeStep, profiler
from ..logs._progress import ReportStep, Stream, progress
from ..logs._wandb import load_wandb, wandb_writer
from ..plan._from_config import set_up
from ..plan._setup import Setup
from ..runtime._multihost import broadcast_from_first, is_first_process
from ..runtime._run_lock import locked_run_folder, on_first_process
from ..runtime._step_watch import StepWatch
from ..runtime._stop import ShouldStop, StopRequests, TerminatedError, check_step
from ..step._evaluate import Evaluate, make_evaluate
from ..step._mpmd import trace_mpmd_train_step
from ..step._state import TrainState
from ..step._step import make_train_step, shard_batch_of_step
from ._batches import make_data
from ._resume import (
    ResumePoint,
    check_resume,
    clean_up,
    find_resume_point,
    history_metadata,
    truncate_metrics,
)
from ._run_history import archive_history, read_saved, record_saved, record_start

Metrics = dict[str, float]

Save = Callable[[int, TrainState, Metrics], Callable[[], TrainState]]
"""Saves a checkpoint, which consumes the state. Returns a function that gives the state back."""

DeviceMetrics = Mapping[str, jax.Array | mpmd.MpmdArray]
"""Metrics that may not be computed yet."""


def train(
    config: Config, *, stream: Stream | None = None, keep_history: bool = True
) -> list[Metrics]:
    """Trains, resuming from the newest checkpoint of the run if there is one.

    Writes `config.yml`, `metrics.jsonl`, TensorBoard events and `checkpoints/` into
    `output_dir/run_name`. Of several processes all call it, with one `output_dir` that all of them
    see, and the first writes and shows what is not a checkpoint.

    Args:
        config: The run.
        stream: Where progress is shown. Default: standard output.
        keep_history: Keep the metrics in memory too, some 1 kB a step.

    Returns:
        The metrics of every step this call has made, or none if they are not kept. All steps are
        done then, or `max_minutes` are over.

    Raises:
        ValueError: Before anything compiles, if the config does not suit the devices or the data,
            or the newest checkpoint is of another model, or another run writes to the same folder.
        RunError: If a step is bad and `bad_step_policy` is to stop, or the disk fails.
        TerminatedError: If a signal has ended the run before its last step, when all is saved.
        KeyboardInterrupt: If SIGINT came before the first step was made, or a second time.
        RuntimeError: If a step, a checkpoint or a batch fails later.
    """
    shown: Stream = (stream or sys.stdout) if is_first_process() else io.StringIO()
    if config.jax_cache_dir:
        jax.config.update("jax_compilation_cache_dir", config.jax_cache_dir)
    if config.enable_wandb:
        load_wandb()
    setup = set_up(config, jax.devices())
    check_fits(setup)
    data = make_data(setup)
    watch = StepWatch(config.step_timeout_minutes)
    batch_at, evaluate = data.training, make_evaluate(setup, data.evaluation, watch.record_progress)
    folder = Path(config.output_dir) / config.run_name
    with ExitStack() as stack:
        stack.enter_context(watch)
        if not setup.per_stage_state:
            stack.enter_context(jax.set_mesh(setup.mesh))
        stack.enter_context(locked_run_folder(folder))
        stop = stack.enter_context(StopRequests())  # until the last checkpoint is written
        found = on_first_process(
            lambda: find_resume_point(folder, config), f"cannot go on in {str(folder)!r}"
        )
        done = broadcast_from_first(found.step if found else 0)
        warnings = _check_resume_on_first(found, setup, batch_at, done)
        said = on_first_process(
            lambda: clean_up(found) if found else [], f"cannot tidy {str(folder)!r}"
        )
        print("".join(f"{line}\n" for line in said or []), end="", file=shown)
        if done >= config.steps:
            print(f"{folder} has all {done} steps. Nothing to do.", file=shown)
            return []
        checkpoints = stack.enter_context(_open_run_checkpoints(config, folder))
        restored = restore_state(setup, checkpoints, done) if checkpoints and done else None
        print(describe(setup, done), file=shown)
        print("".join(f"{warning}\n" for warning in warnings), end="", file=shown)
        first = first_state(setup) if restored is None else restored
        run = _RunContext(setup, batch_at, evaluate, checkpoints, folder, found, shown, stop, watch)
        return [metrics for metrics in _run_and_record_steps(run, first, done) if keep_history]


@dataclass(frozen=True)
class _RunContext:
    """The inputs and outputs of a run."""

    setup: Setup
    batch_at: Batches
    evaluate: Evaluate | None
    checkpoints: ocp.CheckpointManager | None
    folder: Path
    found: ResumePoint | None  # of the first process
    shown: Stream
    stop: StopRequests
    watch: StepWatch


def _run_and_record_steps(run: _RunContext, state: TrainState, done: int) -> Iterator[Metrics]:
    """Runs the steps from `state` on and writes their outputs; yields the metrics of each."""
    setup, checkpoints = run.setup, run.checkpoints
    config = setup.config
    on_first_process(lambda: _record_start(run, done), f"cannot write to {str(run.folder)!r}")
    by_time, step = CheckpointTimer(config.checkpoint_minutes), done
    run.stop.start_clock(config.max_minutes)
    with ExitStack() as stack:
        write, report = _open_outputs(stack, config, run.folder, run.shown, first_step=done + 1)
        before = stack.enter_context(
            profiler(parse_profile_steps(config.profile_steps), run.folder)
        )
        steps = run_steps(
            setup,
            state,
            done,
            run.batch_at,
            save=_make_save(run, checkpoints, by_time) if checkpoints else None,
            before=before,
            should_stop=run.stop,
            evaluate=run.evaluate,
            is_best=best_loss_tracker(checkpoints, config.keep_best),
            is_due=by_time.is_due,
            enter=run.watch.enter,
        )
        try:
            for step, metrics in steps:
                write(step, metrics)
                report(step, metrics)
                if skipped := check_step(config, step, metrics):
                    print(skipped, file=run.shown)
                yield metrics
        except ValueError as error:
            # What the user could have got wrong was checked before.
            raise RuntimeError(f"The run failed after step {step}.") from error
    run.watch.enter(step, "checkpoint")  # which may still be written
    if step < config.steps:
        rest = "start again to go on" if checkpoints else "nothing is saved"
        print(f"stopped after step {step}: {rest}", file=run.shown)
        if signum := run.stop.cause():
            raise TerminatedError(signum, step)


def _make_save(
    run: _RunContext, checkpoints: ocp.CheckpointManager, by_time: CheckpointTimer
) -> Save:
    to_canonical, from_canonical = canonical_round_trip(run.setup)
    decided = _metadata(run.setup, run.batch_at)

    def save(step: int, state: TrainState, metrics: Metrics) -> Callable[[], TrainState]:
        canonical, loss = to_canonical(state), metrics.get("eval_loss")
        metadata = {"step": step, **decided}
        if is_first_process():
            metadata |= history_metadata(run.folder, run.setup.config)
        save_checkpoint(checkpoints, step, canonical, metadata, eval_loss=loss)
        by_time.saved()
        return lambda: from_canonical(state, canonical)

    return save


def run_steps(
    setup: Setup,
    state: TrainState,
    done: int,
    batch_at: Batches,
    *,
    save: Save | None = None,
    before: BeforeStep = lambda step, previous: None,
    should_stop: ShouldStop = lambda step: False,
    evaluate: Evaluate | None = None,
    is_best: Callable[[float], bool] = lambda loss: False,
    is_due: Callable[[int], bool] = lambda step: False,
    enter: Callable[[int, str], None] = lambda step, phase: None,
) -> Iterator[tuple[int, Metrics]]:
    """Runs the steps `done + 1` to `steps`.

    The host reads the metrics of a step while the next one runs. The next step waits only where an
    evaluation or a checkpoint is due. Metrics are yielded before the checkpoint is taken: a run
    that is killed during the checkpoint resumes with none of them missing.

    Args:
        setup: The run.
        state: The train state before step `done + 1`.
        done: The number of steps that were done before.
        batch_at: Returns the batch of a step.
        save: Takes a checkpoint. None for no checkpoints.
        before: Is called before every step, with the metrics of the step before it if that step may
            still run.
        should_stop: Returns whether a step is the last one; it gets a checkpoint.
        evaluate: Evaluates a state. None for no evaluation.
        is_best: Returns whether a state with this `eval_loss` gets a checkpoint.
        is_due: Returns whether a step gets a checkpoint beside those of `checkpoint_period`.
        enter: Is called with a step and its phase, one of `PHASES`, before each phase.

    Yields:
        The number of each step and its metrics.
    """
    config, train_step = setup.config, make_train_step(setup)
    ended = time.perf_counter()
    previous: tuple[int, DeviceMetrics] | None = None
    for step in range(done + 1, config.steps + 1):
        enter(step, "data")
        before(step, previous and previous[1])
        batch = shard_batch_of_step(setup, batch_at, step - 1)
        enter(step, "traced step" if step == config.mpmd_trace_step else "step")
        if step == config.mpmd_trace_step:
            (state, metrics), trace = trace_mpmd_train_step(setup, state, batch)
            _write_trace(config, trace)
        else:
            state, metrics = train_step(state, batch)
        if previous is not None:
            ended, values = _wait_for_metrics(setup, previous[1], ended)
            yield previous[0], values
        previous = step, metrics
        is_stopped, is_last = should_stop(step), step == config.steps
        saves = is_stopped or is_last or step % config.checkpoint_period == 0 or is_due(step)
        # Who is stopped has little time, and needs it for the checkpoint.
        evaluates = evaluate and not is_stopped and (is_last or step % config.eval_interval == 0)
        if saves or evaluates:
            ended, values = _wait_for_metrics(setup, metrics, ended)
            if evaluate and evaluates:
                enter(step, "evaluation")
                values |= evaluate(state)
                ended = time.perf_counter()
                saves = is_best(values["eval_loss"]) or saves
            yield step, values
            if saves and save:
                enter(step, "checkpoint")
                from_canonical = save(step, state, values)
                state = state if is_stopped or is_last else from_canonical()
            previous = None
        if is_stopped:
            return


def _write_trace(config: Config, trace: str) -> None:
    if is_first_process():
        file = Path(config.output_dir) / config.run_name / f"trace_{config.mpmd_trace_step}.json"
        write_file(file, trace)


def _wait_for_metrics(
    setup: Setup, metrics: DeviceMetrics, started: float
) -> tuple[float, Metrics]:
    """Waits for a step. Returns the time when it ended, in seconds, and its metrics, loss first."""
    values = {name: float(x) for name, x in jax.device_get(metrics).items()}
    ended = time.perf_counter()
    return ended, {"loss": values.pop("loss"), **values, **speed_metrics(setup, ended - started)}


def _open_run_checkpoints(
    config: Config, folder: Path
) -> AbstractContextManager[ocp.CheckpointManager | None]:
    if not config.enable_checkpointing:
        return nullcontext()
    return closing_checkpoints(
        open_checkpoints(
            folder / "checkpoints",
            max_to_keep=config.max_to_keep,
            asynchronous=config.async_checkpointing,
            keep_best=config.keep_best,
            on_saved=partial(record_saved, folder),
        )
    )


def _open_outputs(
    stack: ExitStack, config: Config, folder: Path, stream: Stream, *, first_step: int
) -> tuple[WriteMetrics, ReportStep]:
    if not is_first_process():
        return (lambda step, metrics: None), (lambda step, metrics: None)
    write = metrics_writer(
        folder,
        first_step=first_step,
        tensorboard=config.enable_tensorboard,
        also=wandb_writer(config, folder) if config.enable_wandb else None,
    )
    report = progress(
        stream,
        num_steps=config.steps,
        log_period=config.log_period,
        first_step=first_step,
        bar=config.enable_progress_bar,
    )
    return stack.enter_context(write), stack.enter_context(report)


def restore_state(setup: Setup, checkpoints: ocp.CheckpointManager, step: int) -> TrainState:
    """Restores the state of a checkpoint in the layout of this run.

    Args:
        setup: The run.
        checkpoints: The checkpoints.
        step: The step of the checkpoint.

    Returns:
        The train state, on the devices of this run.

    Raises:
        ValueError: If the checkpoint is of another model.
    """
    saved = read_metadata(checkpoints, step)
    check_same_sizes(saved["model"], setup, f"{checkpoints.directory} step {step}")
    as_saved = with_layers_after(setup, saved.get("layers_after", 0))
    return state_from_canonical(
        setup, restore_checkpoint(checkpoints, step, canonical_shapes(as_saved))
    )


def _metadata(setup: Setup, batches: Batches) -> Mapping[str, Any]:
    return {
        "model": dataclasses.asdict(setup.model_config),
        "layers_after": setup.num_layers_after_pipeline,
        "data": batches.decided_by,
    }


def _check_resume_on_first(
    found: ResumePoint | None, setup: Setup, batches: Batches, done: int
) -> list[str]:
    """Returns warnings on changes since the checkpoint; none on all but the first process."""

    def check() -> list[str]:
        if not found or not 0 < done < setup.config.steps:
            return []
        return check_resume(found, setup, batches.decided_by)

    return on_first_process(check, "finds that this run would not go on as it began") or []


def _record_start(run: _RunContext, done: int) -> None:
    """Records a start of the run before its first step."""
    folder, found, config = run.folder, run.found, run.setup.config
    if found and found.begins_anew:
        names = ", ".join(archive_history(folder))
        print(f"The run begins anew. What it was is kept as {names}.", file=run.shown)
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    write_file(folder / "config.yml", text)
    if read_saved(folder) is None:
        record_saved(folder, done)
    record_start(folder, run.setup, done)
    if found and done:
        truncate_metrics(found)
