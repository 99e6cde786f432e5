"""Tells whether a run goes on, and finds what deserves attention: bad steps, corrupt files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ...train.runtime import bad_step_reason
from ..record import RunRecord, Series

_FRESH_SECONDS = 60.0
_MAX_LISTED = 8
_WINDOW = 32  # steps before one, which its loss is compared with
_SPIKE = 8.0  # deviations above their median, each of them 1.48 median absolute deviations
_LEAST_SPIKE = 1.1  # times that median
_SLOW = 2.0  # times the median step time
_FALL = 0.9  # of the fastest tenth of a run
_RISE = 1.05  # times the least evaluation loss
_LARGE_BUBBLE = 0.25


@dataclass(frozen=True)
class Status:
    """The progress of a run."""

    kind: str  # `finished`, `running`, `stopped` or `bad`
    text: str  # a sentence that says the same
    done: int  # the steps that are done
    num_steps: int  # the steps of the whole run

    @property
    def share(self) -> float:
        """Returns the share of the run that is done, 0 to 1."""
        return min(1.0, self.done / max(1, self.num_steps))


def status(run: RunRecord, now: float) -> Status:
    """Derives the status of a run from its last metrics, their age and its checkpoints."""
    done, num_steps = run.steps[-1], run.wanted_steps
    if problem := _bad(run):
        return Status("bad", f"Step {done} of {num_steps} is bad: {problem}", done, num_steps)
    if done >= num_steps:
        return Status("finished", f"Finished: {done} steps", done, num_steps)
    age, times = max(0.0, now - run.written), run.series.get("step_time_seconds")
    seconds = float(times.finite[-1]) if times is not None and len(times.finite) else 0.0
    if age < max(_FRESH_SECONDS, 10 * seconds):
        return Status("running", f"At step {done} of {num_steps}", done, num_steps)
    saved = any(saved.step == done and saved.state == "complete" for saved in run.saved)
    how = "stopped with a checkpoint" if saved else "ended"
    return Status("stopped", f"{how.capitalize()} at step {done} of {num_steps}", done, num_steps)


def _bad(run: RunRecord) -> str:
    """Returns the reason why a bad step has ended the run, or ""."""
    if run.values.get("bad_step_policy", "stop") != "stop":
        return ""
    last = {
        name: float(run.series[name].values[-1])
        for name in ("loss", "gradient_norm")
        if name in run.series and run.series[name].steps[-1] == run.steps[-1]
    }
    return bad_step_reason(last, run.values.get("max_gradient_norm") or 0.0)


@dataclass(frozen=True)
class Finding:
    """One observation about a run."""

    level: str  # `bad`, `warning` or `note`
    title: str  # a few words that name it
    text: str  # a sentence with numbers
    steps: tuple[int, ...] = ()  # the steps it is about, if it is about steps


def findings(run: RunRecord, status: Status, bubble: float | None) -> list[Finding]:
    """Returns all observations about a run, the worst first; `bubble` is predicted, if known."""
    all_findings = [
        *_not_finite(run),
        *_skipped(run),
        *_spikes(run),
        *_rising(run),
        *_find_corrupt_checkpoints(run),
        *_unsaved(run, status),
        *_repeated(run),
        *_gaps(run),
        *_slow(run),
        *_falling(run),
        *_large_bubble(bubble),
    ]
    order = ("bad", "warning", "note")
    return sorted(all_findings, key=lambda finding: order.index(finding.level))


def spikes(series: Series) -> np.ndarray:
    """Returns the first steps at which a loss leaves the range of the 32 steps before."""
    finite = np.isfinite(series.values)
    steps, values = series.steps[finite], series.values[finite]
    if len(values) <= _WINDOW:
        return np.array([], int)
    before = sliding_window_view(values, _WINDOW)[:-1]
    middle = np.median(before, axis=1)
    deviation = 1.48 * np.median(np.abs(before - middle[:, None]), axis=1)
    after = values[_WINDOW:]
    high = (after > middle + _SPIKE * deviation) & (after > _LEAST_SPIKE * np.abs(middle))
    first = high & ~np.concatenate([[False], high[:-1]])
    return steps[_WINDOW:][first]


def _not_finite(run: RunRecord) -> Iterator[Finding]:
    for name, series in run.series.items():
        steps = series.steps[~np.isfinite(series.values)]
        if len(steps):
            yield _at_steps("bad", f"{name} is not a number", steps, "NaN or infinite in {}.")


def _skipped(run: RunRecord) -> Iterator[Finding]:
    if "skipped" in run.series:
        steps = run.series["skipped"].steps[run.series["skipped"].values > 0]
        if len(steps):
            yield _at_steps("warning", "Skipped steps", steps, "Weights did not change in {}.")


def _spikes(run: RunRecord) -> Iterator[Finding]:
    if "loss" in run.series:
        steps = spikes(run.series["loss"])
        if len(steps):
            text = f"The loss left the range of the {_WINDOW} steps before in {{}}."
            yield _at_steps("warning", "Spikes in the loss", steps, text)


def _rising(run: RunRecord) -> Iterator[Finding]:
    series = run.series.get("eval_loss")
    if series is None or not len(series.finite):
        return
    steps = series.steps[np.isfinite(series.values)]
    best, last = int(np.argmin(series.finite)), float(series.finite[-1])
    least = float(series.finite[best])
    if len(steps) - best > 3 and last > _RISE * least:
        text = (
            f"It was {least:.4g} after step {steps[best]} and is {last:.4g}: the model learns its "
            "data by heart. More data, dropout or fewer steps help."
        )
        yield Finding("warning", "Rising evaluation loss", text, (int(steps[best]),))


def _find_corrupt_checkpoints(run: RunRecord) -> Iterator[Finding]:
    for saved in run.saved:
        text = f"The checkpoint of step {saved.step} is {saved.state}."
        if "corrupt" in saved.state or "incomplete" in saved.state:
            yield Finding("warning", "Corrupt checkpoint", text, (saved.step,))
        elif "without" in saved.state:
            yield Finding("warning", "Checkpoint without digests", text, (saved.step,))
        elif "cannot" in saved.state:
            text = f"The checkpoint of step {saved.step} {saved.state}."
            yield Finding("warning", "Unreadable checkpoint", text, (saved.step,))


def _unsaved(run: RunRecord, status: Status) -> Iterator[Finding]:
    if not run.values.get("enable_checkpointing", True) or status.kind == "finished":
        return
    newest = max((saved.step for saved in run.saved if saved.state == "complete"), default=0)
    if lost := status.done - newest:
        text = f"Started again, the run goes on after step {newest}: {_steps(lost)} come again."
        yield Finding("note", "Steps after the newest checkpoint", text)


def _repeated(run: RunRecord) -> Iterator[Finding]:
    again = [start for start in run.starts if start["first_step"] > 1]
    if again:
        repeated = sum(start.get("repeated_steps", 0) for start in run.starts)
        where = ", ".join(f"{start['first_step']}" for start in again[:_MAX_LISTED])
        more = ", ..." if len(again) > _MAX_LISTED else ""
        how_often = "once" if len(again) == 1 else f"{len(again)} times"
        text = f"The run went on {how_often}, at step {where}{more}; "
        text += f"{_steps(repeated)} came again." if repeated else "no step came again."
        level = "warning" if repeated else "note"
        yield Finding(level, "Restarts", text, tuple(start["first_step"] for start in again))


def _gaps(run: RunRecord) -> Iterator[Finding]:
    steps = np.array(run.steps)
    missing = int(steps[-1] - len(steps))
    if missing > 0:
        after = steps[:-1][np.diff(steps) > 1].tolist()
        first = [0] if steps[0] > 1 else []
        yield _at_steps(
            "warning",
            "Missing lines",
            np.array([*first, *after]),
            f"metrics.jsonl has no line of {_steps(missing)}, after {{}}.",
        )


def _slow(run: RunRecord) -> Iterator[Finding]:
    series = run.series.get("step_time_seconds")
    if series is None or len(series.finite) < 10:
        return
    firsts = {1, run.steps[0], *(start["first_step"] for start in run.starts)}
    median = float(np.median(series.finite))
    is_slow = (series.values > _SLOW * median) & ~np.isin(series.steps, list(firsts))
    if not is_slow.any():
        return
    lost = float((series.values[is_slow] - median).sum())
    text = (
        f"More than {_SLOW:g} times the median of {median:.3g} s in {{}}: {lost:.3g} s in all, "
        f"{lost / float(series.finite.sum()):.1%} of the run."
    )
    level = "warning" if lost > 0.05 * series.finite.sum() else "note"
    yield _at_steps(level, "Slow steps", series.steps[is_slow], text)


def _falling(run: RunRecord) -> Iterator[Finding]:
    series = run.series.get("tokens_per_second")
    if series is None or len(series.finite) < 50:
        return
    tenths = [float(np.median(tenth)) for tenth in np.array_split(series.finite, 10)]
    if tenths[-1] < _FALL * max(tenths):
        text = (
            f"The last tenth of the steps has a median of {tenths[-1]:,.0f} tokens/s, the fastest "
            f"tenth {max(tenths):,.0f}."
        )
        yield Finding("warning", "Falling throughput", text)


def _large_bubble(bubble: float | None) -> Iterator[Finding]:
    if bubble is not None and bubble > _LARGE_BUBBLE:
        text = (
            f"By its schedule even the busiest rank waits for {bubble:.0%} of a step. More "
            "microbatches, or stages per rank, make that less."
        )
        yield Finding("note", "Large bubble", text)


def _at_steps(level: str, title: str, steps: np.ndarray, text: str) -> Finding:
    listed_steps: Sequence[int] = steps.tolist()
    listed = ", ".join(map(str, listed_steps[:_MAX_LISTED]))
    more = (
        f" and {len(listed_steps) - _MAX_LISTED:,} more" if len(listed_steps) > _MAX_LISTED else ""
    )
    where = f"{'step' if len(listed_steps) == 1 else 'steps'} {listed}{more}"
    return Finding(level, title, text.format(where), tuple(listed_steps))


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"
