"""Where a run stands."""

from dataclasses import dataclass

from ..train import bad_step
from ._run import Run

_FRESH_SECONDS = 60.0


@dataclass(frozen=True)
class Status:
    """Attributes:
    kind: `finished`, `running`, `stopped` or `bad`.
    text: The same for people.
    done: Steps done.
    wanted: Steps of the whole run.
    """

    kind: str
    text: str
    done: int
    wanted: int

    @property
    def share(self) -> float:
        """Of the run that is done, 0 to 1."""
        return min(1.0, self.done / max(1, self.wanted))


def status(run: Run, now: float) -> Status:
    """What the last line of metrics, its age and the checkpoints say.

    Args:
        run: The run.
        now: Seconds since 1970.
    """
    done, wanted = run.steps[-1], run.wanted_steps
    if problem := _bad(run):
        return Status("bad", f"Step {done} of {wanted} is bad: {problem}", done, wanted)
    if done >= wanted:
        return Status("finished", f"Finished: {done} steps", done, wanted)
    age = max(0.0, now - run.written)
    if age < max(_FRESH_SECONDS, 10 * _step_seconds(run)):
        return Status("running", f"At step {done} of {wanted}", done, wanted)
    saved = any(saved.step == done and saved.state == "complete" for saved in run.saved)
    how = "stopped with a checkpoint" if saved else "ended"
    return Status("stopped", f"{how.capitalize()} at step {done} of {wanted}", done, wanted)


def _bad(run: Run) -> str:
    """What ended the run, if its policy is to stop at such steps."""
    if run.values.get("bad_step_policy", "stop") != "stop":
        return ""
    last = {
        name: float(run.series[name].values[-1])
        for name in ("loss", "gradient_norm")
        if name in run.series and run.series[name].steps[-1] == run.steps[-1]
    }
    return bad_step(last, run.values.get("max_gradient_norm") or 0.0)


def _step_seconds(run: Run) -> float:
    times = run.series.get("step_time_seconds")
    return float(times.finite[-1]) if times is not None and len(times.finite) else 0.0
