"""Fills the page's template with the data of a run."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup, escape

from .. import __version__
from ..train.plan import Setup, StepPlan
from . import _memory, _pictures
from ._charts import chart_data, main_and_more
from ._settings import settings
from ._summary import cards, facts, metric_rows
from .analysis import findings, status
from .record import RunRecord


def render(
    run: RunRecord,
    setup: Setup | None,
    *,
    now: datetime,
    why_no_setup: str = "",
    compiled: _memory.CompiledMemory | None = None,
) -> str:
    """Renders a run as one HTML page that loads nothing else.

    Args:
        run: A run, as `read_run` returns it.
        setup: The run's plan on as many devices as it used, of any kind; None if it cannot be
            planned.
        now: The time of the page.
        why_no_setup: The sentence in place of the schedule and of memory, if `setup` is None.
        compiled: The memory of the compiled step, if it was compiled.

    Returns:
        The HTML.
    """
    state = status(run, now.timestamp())
    plan = setup.step if setup else None
    name = _schedule_name(setup) if setup else ""
    predicted = _pictures.predicted_timeline_picture(plan, name) if plan else None
    traced = [picture for file in run.traces for picture in _pictures.traced_step_pictures(file)]
    run_findings = findings(run, state, predicted.bubble if predicted else None)
    data = chart_data(run, run_findings)
    main, more = main_and_more(data["charts"])
    rows = settings(run.values)
    origins = {"preset": "(of the preset) ", "unknown": "no key of this version of jaxpipe"}
    return (
        environment()
        .get_template("page.html")
        .render(
            run=run,
            status=state,
            facts=facts(run, run.num_devices, plan),
            cards=cards(run, state),
            findings=run_findings,
            charts=data["charts"],
            marks=data["marks"],
            bucket=data["bucket"],
            main=main,
            more=more,
            metrics=metric_rows(run),
            figures=_pictures.figures(plan, name) if plan else [],
            pictures=[*([predicted] if predicted else []), *traced],
            traced=traced,
            schedule_notes=_schedule_notes(plan, why_no_setup, bool(traced)),
            memory_notes=_memory.remarks(plan) if plan else [why_no_setup],
            compiled=compiled,
            changed=[
                (s.key, s.value, s.default, origins.get(s.source, "") + s.meaning)
                for s in rows
                if s.source
            ],
            settings=[(s.key, s.value, s.meaning) for s in rows],
            made=f"{now:%Y-%m-%d %H:%M} UTC",
            version=__version__,
            data=data,
            **_tables(run, plan, compiled),
        )
    )


def environment() -> jinja2.Environment:
    """Returns an environment that escapes all values except the package's own files."""
    templates = jinja2.Environment(
        loader=jinja2.FunctionLoader(_file), autoescape=True, undefined=jinja2.StrictUndefined
    )
    for name, file in (("style", "page.css"), ("script", "page.js")):
        templates.globals[name] = Markup(_file(file))
    templates.filters |= {"size": in_bytes, "code": with_code}
    return templates


def _schedule_name(setup: Setup) -> str:
    """Returns the name of a run's schedule, or of its engine's own; "" without a pipeline."""
    if setup.schedule_reason is not None:
        return setup.schedule_reason.split(":")[0]
    own_schedule = setup.step.engine.own_schedule
    return own_schedule.family if own_schedule else ""


def _file(name: str) -> str:
    return resources.files("jaxpipe.report").joinpath(name).read_text(encoding="utf-8")


def in_bytes(count: int) -> str:
    """Formats a size such as `12.3 MB`; units are powers of 1000."""
    size, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size) < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"


def with_code(text: object) -> Markup:
    """Escapes text and sets `names` in backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _schedule_notes(plan: StepPlan | None, why_not: str, is_traced: bool) -> Iterable[str]:
    if plan is None:
        yield why_not
    elif not plan.engine.pipelines:
        yield "The run has no pipeline."
    else:
        yield (
            "Predicted by the costs that `auto` compares schedules with: matrix products of layers "
            "alone, 10 for the forward of a layer; no embedding, loss, optimizer or transfer."
        )
    if is_traced:
        yield (
            "In the traced step a rank waited for each of its actions; ranks of one process take "
            "turns, so their pipeline shows only where each has a process of its own."
        )


def _tables(
    run: RunRecord, plan: StepPlan | None, compiled: _memory.CompiledMemory | None
) -> dict[str, Any]:
    table = _memory.memory_table(plan) if plan else None
    compiled_sizes = asdict(compiled.memory) if compiled else {}
    return {
        "memory": table,
        "memory_rows": [
            *([part.name, *map(in_bytes, part.sizes)] for part in table.parts),
            ["Sum", *map(in_bytes, table.totals)],
        ]
        if table
        else [],
        "compiled_rows": [
            (name.removesuffix("_bytes").capitalize(), in_bytes(size))
            for name, size in compiled_sizes.items()
        ],
        "checkpoint_rows": [
            (s.step, s.state, in_bytes(s.num_bytes), s.num_files, f"{s.time:%Y-%m-%d %H:%M:%S}")
            for s in run.saved
        ],
        "start_rows": [_start_row(start) for start in run.starts],
    }


def _start_row(start: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("num_devices", "num_processes", "repeated_steps", "jax_version")
    time = str(start.get("time", "")).replace("T", " ").removesuffix("+00:00")
    return start["first_step"], time, *(start.get(name, "") for name in names)
