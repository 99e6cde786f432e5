"""Tells whether a run goes on, has ended or has failed."""

from dataclasses import dataclass

from ...train.runtime import bad_step_reason
from ..record import RunRecord

_FRESH_SECONDS = 60.0


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
