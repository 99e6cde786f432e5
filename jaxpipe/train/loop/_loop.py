"""The training loop: state, batches, metrics and checkpoints, step after step."""

import dataclasses
import io
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import yaml

from ..._durable import write_file
from ..checkpoint import _canonical, _store
from ..checkpoint._checkpoint_timer import CheckpointTimer
from ..checkpoint._init_from import check_same_sizes, first_state
from ..config._config import Config, parse_profile_steps
from ..estimate._memory_estimate import check_fits
from ..estimate._step_metrics import step_work
from ..logs._describe import describe
from ..logs._metrics import WriteMetrics, check_metrics, metrics_writer
from ..logs._profile import profiler
from ..logs._progress import SILENT, Report, Stream, compiling, progress
from ..logs._trackers import Tracker, load_trackers, tracking
from ..plan._from_config import set_up
from ..plan._setup import Setup, StepPlan
from ..runtime._multihost import broadcast_from_first, is_first_process
from ..runtime._run_lock import locked_run_folder, on_first_process
from ..runtime._step_watch import StepWatch
from ..runtime._stop import StopRequests, TerminatedError, check_step
from ..sampling._in_training import SampleState, make_sample_state
from ..sampling._prompts import printable
from ..step._evaluate import Evaluate, make_evaluate
from ..step._state import TrainState
from ..step._step import mesh_context, stored_shardings
from . import _resume
from ._batches import RunData, make_data
from ._run_history import archive_history, read_saved, record_saved, record_start
from ._steps import Metrics, Save, ShowSample, run_steps


def train(
    config: Config, *, stream: Stream | None = None, keep_history: bool = True
) -> list[Metrics]:
    """Trains, resuming from the newest checkpoint of the run if there is one.

    Writes `config.yml`, `metrics.jsonl`, TensorBoard events and `checkpoints/` into
    `output_dir/run_name`. Of several processes all call it, with one `output_dir` that all of them
    see, and the first writes and shows what is not a checkpoint.

    Args:
        config: The keys of the run, as `load_config` returns them.
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
    if config.jax_cache_dir not in ("", "auto"):
        jax.config.update("jax_compilation_cache_dir", config.jax_cache_dir)
    trackers = load_trackers(config.tracker_names)
    setup = set_up(config, jax.devices())
    check_fits(setup.step)
    data = make_data(config, setup.batch)
    watch = StepWatch(config.step_timeout_minutes)
    evaluate = make_evaluate(setup.step, config, data.evaluation, watch.record_progress)
    sample_state = make_sample_state(setup)
    folder = Path(config.output_dir) / config.run_name
    with ExitStack() as stack:
        stack.enter_context(watch)
        stack.enter_context(mesh_context(setup.step))
        stack.enter_context(locked_run_folder(folder))
        stop = stack.enter_context(StopRequests())  # until the last checkpoint is written
        resume_point = on_first_process(
            lambda: _resume.find_resume_point(folder, config), f"cannot go on in {str(folder)!r}"
        )
        done = broadcast_from_first(resume_point.step if resume_point else 0)
        warnings = _check_resume_on_first(resume_point, setup, data.training.decided_by, done)
        said = on_first_process(
            lambda: _resume.clean_up(resume_point) if resume_point else [],
            f"cannot tidy {str(folder)!r}",
        )
        print("".join(f"{line}\n" for line in said or []), end="", file=shown)
        if done >= config.steps:
            on_first_process(lambda: check_metrics(folder), f"cannot read {str(folder)!r}")
            print(f"{folder} has all {done} steps. Nothing to do.", file=shown)
            return []
        checkpoints = stack.enter_context(_open_run_checkpoints(config, folder))
        restored = restore_state(setup.step, checkpoints, done) if checkpoints and done else None
        print(describe(setup, done), file=shown)
        print("".join(f"{warning}\n" for warning in warnings), end="", file=shown)
        allowed = config.allow_unverified
        if restored is None:
            restored = first_state(setup.step, config.init_from, allow_unverified=allowed)
        run = _RunContext(
            setup=setup,
            data=data,
            evaluate=evaluate,
            sample_state=sample_state,
            checkpoints=checkpoints,
            folder=folder,
            trackers=trackers,
            resume_point=resume_point,
            shown=shown,
            stop=stop,
            watch=watch,
        )
        return [metrics for metrics in _run_and_record_steps(run, restored, done) if keep_history]


@dataclass(frozen=True)
class _RunContext:
    """The inputs and outputs of a run."""

    setup: Setup
    data: RunData
    evaluate: Evaluate | None
    sample_state: SampleState | None
    checkpoints: ocp.CheckpointManager | None
    folder: Path
    trackers: Mapping[str, Tracker]
    resume_point: _resume.ResumePoint | None  # of the first process
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
        write, report = _open_outputs(stack, run, first_step=done + 1)
        before = stack.enter_context(
            profiler(parse_profile_steps(config.profile_steps), run.folder)
        )
        steps = run_steps(
            setup.step,
            config,
            state,
            done,
            run.data.training,
            work=step_work(setup.state.weights, setup.batch, config.peak_tflops_per_device),
            write_trace=partial(_write_trace, run.folder),
            save=_make_save(run, checkpoints, by_time) if checkpoints else None,
            before=before,
            should_stop=run.stop,
            evaluate=run.evaluate,
            show_sample=_make_show_sample(run.sample_state, report.say),
            is_best=_store.best_loss_tracker(checkpoints, config.keep_best),
            is_due=by_time.is_due,
            enter=run.watch.enter,
            compiling=partial(
                compiling, run.shown, "the train step", spinner=config.enable_progress_bar
            ),
        )
        try:
            for step, metrics in steps:
                write(step, metrics)
                report.step(step, metrics)
                if skipped := check_step(
                    step,
                    metrics,
                    policy=config.bad_step_policy,
                    max_gradient_norm=config.max_gradient_norm,
                ):
                    report.say(skipped)
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
    config, state_plan = run.setup.config, run.setup.state
    stored = stored_shardings(run.setup.step)
    to_canonical, from_canonical = _canonical.canonical_round_trip(state_plan, stored)
    decided = {
        "decoder_block": config.decoder_block,
        "model": dataclasses.asdict(state_plan.weights.sizes),
        "layers_after": state_plan.weights.num_layers_after,
        "optimizer": config.named_optimizer,
        "data": run.data.training.decided_by,
    }

    def save(step: int, state: TrainState, metrics: Metrics) -> Callable[[], TrainState]:
        run.data.check_files()  # else the next start would find other data than the checkpoint's
        canonical, loss = to_canonical(state), metrics.get("eval_loss")
        metadata = {"step": step, **decided}
        if is_first_process():
            metadata |= _resume.history_metadata(run.folder, config.num_schedule_steps)
        _store.save_checkpoint(checkpoints, step, canonical, metadata, eval_loss=loss)
        by_time.saved()
        return lambda: from_canonical(state, canonical)

    return save


def _make_show_sample(
    sample_state: SampleState | None, say: Callable[[str], None]
) -> ShowSample | None:
    if sample_state is None:
        return None

    def show_sample(step: int, state: TrainState) -> TrainState:
        sample, state = sample_state(state)
        text = textwrap.indent(printable(sample.text), "    ")
        say(f"sample after step {step}:\n\n{text}\n")
        return state

    return show_sample


def _write_trace(folder: Path, step: int, trace: str) -> None:
    if is_first_process():
        write_file(folder / f"trace_{step}.json", trace)


def _open_run_checkpoints(
    config: Config, folder: Path
) -> AbstractContextManager[ocp.CheckpointManager | None]:
    if not config.enable_checkpointing:
        return nullcontext()
    return _store.closing_checkpoints(
        _store.open_checkpoints(
            folder / "checkpoints",
            max_to_keep=config.max_to_keep,
            asynchronous=config.async_checkpointing,
            keep_best=config.keep_best,
            on_saved=partial(record_saved, folder),
        )
    )


def _open_outputs(
    stack: ExitStack, run: _RunContext, *, first_step: int
) -> tuple[WriteMetrics, Report]:
    config = run.setup.config
    if not is_first_process():
        return (lambda step, metrics: None), SILENT
    write = metrics_writer(
        run.folder,
        first_step=first_step,
        tensorboard=config.enable_tensorboard,
        also=tracking(
            run.trackers,
            run.folder,
            project=config.tracker_project,
            name=config.run_name,
            settings=config.model_dump(mode="json"),
        ),
    )
    report = progress(
        run.shown,
        num_steps=config.steps,
        log_period=config.log_period,
        first_step=first_step,
        bar=config.enable_progress_bar,
    )
    return stack.enter_context(write), stack.enter_context(report)


def restore_state(plan: StepPlan, checkpoints: ocp.CheckpointManager, step: int) -> TrainState:
    """Restores the state of a checkpoint in the layout of this run."""
    saved = _store.read_metadata(checkpoints, step)
    sizes = plan.state.weights.sizes
    check_same_sizes(saved["model"], sizes, f"{checkpoints.directory} step {step}")
    as_saved = _canonical.with_layers_after(plan.state, saved.get("layers_after", 0))
    canonical = _store.restore_checkpoint(checkpoints, step, _canonical.canonical_shapes(as_saved))
    return _canonical.state_from_canonical(plan.state, stored_shardings(plan), canonical)


def _check_resume_on_first(
    resume_point: _resume.ResumePoint | None,
    setup: Setup,
    decided_by: Mapping[str, Any],
    done: int,
) -> list[str]:
    """Returns warnings on changes since the checkpoint; none on all but the first process."""

    def check() -> list[str]:
        if not resume_point or not 0 < done < setup.config.steps:
            return []
        return _resume.check_resume(
            resume_point,
            setup.config,
            sizes=setup.state.weights.sizes,
            decided_by=decided_by,
        )

    return on_first_process(check, "finds that this run would not go on as it began") or []


def _record_start(run: _RunContext, done: int) -> None:
    """Records a start of the run before its first step."""
    folder, resume_point, config = run.folder, run.resume_point, run.setup.config
    if resume_point and resume_point.begins_anew:
        names = ", ".join(archive_history(folder))
        print(f"The run begins anew. What it was is kept as {names}.", file=run.shown)
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    write_file(folder / "config.yml", text)
    if read_saved(folder) is None:
        record_saved(folder, done)
    record_start(folder, run.setup.mesh, done)
    if resume_point and done:
        _resume.truncate_metrics(resume_point)
