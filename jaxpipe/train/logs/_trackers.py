"""Trackers of experiments, which are told the metrics of every step.

A tracker is a function of the folder of a run, its project, name and settings. It returns a context
manager that is left when the run ends, and whose value is told the metrics of a step:

    @contextmanager
    def tracker(folder, *, project, name, settings):
        with open(folder / "metrics.txt", "a") as file:
            yield lambda step, metrics: print(step, metrics["loss"], file=file)

`trackers` names one of a library, or the user's own as `module:function`. A run that is resumed in
its folder is resumed there too. Steps that are repeated after a kill are told again.
"""

import importlib
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..._durable import write_file
from ..._input import clause, import_function
from ..runtime._reading import read_file
from ..runtime._stop import RunError
from ._metrics import WriteMetrics

Tracker = Callable[..., AbstractContextManager[WriteMetrics]]
"""`tracker(folder, project=, name=, settings=)`."""

TRACKERS_FILE = "trackers.json"
"""The ids by which libraries know a run."""

_PARAMETERS_PER_CALL = 100  # MLflow's limit


def load_trackers(names: Sequence[str]) -> dict[str, Tracker]:
    """Imports trackers; raises ValueError if one is unknown or not installed."""
    return {name: _load_tracker(name) for name in names}


def _load_tracker(name: str) -> Tracker:
    if ":" in name:
        return import_function("trackers", name, "`folder`, `project`, `name` and `settings`")
    if name not in LIBRARIES:
        raise ValueError(
            f"`trackers` has {name!r}. Give {', '.join(LIBRARIES)}, or `module:function` of your "
            "own."
        )
    import_library, tracker = LIBRARIES[name]
    try:
        return partial(tracker, import_library())
    except ImportError as error:
        raise ValueError(
            f"`trackers` has {name!r}, which cannot be imported ({clause(error)}). `pip install "
            f"{name}`, or leave it out."
        ) from error


@contextmanager
def tracking(
    trackers: Mapping[str, Tracker],
    folder: Path,
    *,
    project: str,
    name: str,
    settings: Mapping[str, Any],
) -> Iterator[WriteMetrics]:
    """Opens trackers, and yields a function that tells all of them the metrics of a step."""
    with ExitStack() as stack:
        writers: dict[str, WriteMetrics] = {}
        for tracker_name, tracker in trackers.items():
            run = partial(tracker, folder, project=project, name=name, settings=dict(settings))
            writers[tracker_name] = stack.enter_context(_opened(tracker_name, run))

        def write(step: int, metrics: Mapping[str, float]) -> None:
            for tracker_name, write_there in writers.items():
                with _naming(tracker_name, f"did not take the metrics of step {step}"):
                    write_there(step, dict(metrics))

        yield write


@contextmanager
def _opened(name: str, tracker: Tracker) -> Iterator[WriteMetrics]:
    """Opens a tracker. Its error does not hide another one that ends the run."""
    with _naming(name, "could not be opened"):
        context = tracker()
        write = context.__enter__()
    try:
        yield write
    except BaseException:
        with suppress(Exception):
            context.__exit__(*sys.exc_info())
        raise
    with _naming(name, "could not be closed"):
        context.__exit__(None, None, None)


@contextmanager
def _naming(tracker: str, what: str) -> Iterator[None]:
    """Raises the errors of a tracker as RunError."""
    try:
        yield
    except Exception as error:  # whatever a library or a user's function raises
        raise RunError(
            f"The tracker {tracker!r} {what}: {type(error).__name__}: {clause(error)}. Repair it, "
            "or leave it out of `trackers`, and start again to go on."
        ) from error


@contextmanager
def _wandb(
    wandb: Any, folder: Path, *, project: str, name: str, settings: dict[str, Any]
) -> Iterator[WriteMetrics]:
    """Weights & Biases, which keeps the first values of steps that are repeated."""
    run = wandb.init(
        project=project,
        name=name,
        id=_stored_id(folder, "wandb", lambda: secrets.token_hex(8)),
        resume="allow",
        dir=str(folder),
        config=settings,
    )
    try:
        yield lambda step, metrics: run.log(dict(metrics), step=step)
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()


@contextmanager
def _mlflow(
    mlflow: Any, folder: Path, *, project: str, name: str, settings: dict[str, Any]
) -> Iterator[WriteMetrics]:
    """MLflow, where `MLFLOW_TRACKING_URI` says; its experiment is the project."""
    client, entities = mlflow.MlflowClient(), importlib.import_module("mlflow.entities")

    def create() -> str:
        known = client.get_experiment_by_name(project)
        experiment = known.experiment_id if known else client.create_experiment(project)
        created = client.create_run(experiment, run_name=name).info.run_id
        parameters = [entities.Param(key, str(value)) for key, value in settings.items()]
        for start in range(0, len(parameters), _PARAMETERS_PER_CALL):
            some = parameters[start : start + _PARAMETERS_PER_CALL]
            client.log_batch(created, params=some)
        return created

    run_id = _stored_id(folder, "mlflow", create)
    client.update_run(run_id, status="RUNNING")

    def write(step: int, metrics: Mapping[str, float]) -> None:
        now = round(time.time() * 1000)
        values = [entities.Metric(key, value, now, step) for key, value in metrics.items()]
        client.log_batch(run_id, metrics=values)

    try:
        yield write
    except BaseException:
        client.set_terminated(run_id, status="FAILED")
        raise
    client.set_terminated(run_id)


@contextmanager
def _trackio(
    trackio: Any, folder: Path, *, project: str, name: str, settings: dict[str, Any]
) -> Iterator[WriteMetrics]:
    """Trackio, which knows runs by their names alone: an id follows that of the run."""
    full_name = _stored_id(folder, "trackio", lambda: f"{name}-{secrets.token_hex(4)}")
    run = trackio.init(project=project, name=full_name, config=settings, resume="allow")
    try:
        yield lambda step, metrics: run.log(dict(metrics), step=step)
    finally:
        run.finish()


LIBRARIES: Mapping[str, tuple[Callable[[], Any], Tracker]] = {
    "wandb": (lambda: importlib.import_module("wandb"), _wandb),
    "mlflow": (lambda: importlib.import_module("mlflow"), _mlflow),
    "trackio": (lambda: importlib.import_module("trackio"), _trackio),
}
"""How libraries are imported, and the trackers whose first argument they are."""


def _stored_id(folder: Path, library: str, make: Callable[[], str]) -> str:
    """Returns the id by which a library knows the run of a folder; a new one is made and stored."""
    file = folder / TRACKERS_FILE
    ids = json.loads(read_file(file) or b"{}")
    if library not in ids:
        ids[library] = make()
        write_file(file, json.dumps(ids) + "\n")
    return ids[library]
