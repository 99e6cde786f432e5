"""Compiles a step with each group of flags, and shows what each makes asynchronous.

GB are 1e9 bytes of results, per device and step.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..compile_report import CompileReport
from ..compile_report._report import align, shorten
from ..hlo import totals

NO_FLAGS, DEFAULTS, TOGETHER = "none", "defaults", "together"
MEMORY_FACTOR = 1.03
"""How much more memory a group may need than no flags, if it is to be combined with others."""


@dataclass(frozen=True)
class ProbedGroup:
    """A step that was compiled with one group of flags."""

    # The name of the group; "none" for no flags, "defaults" for all that are set, "together" for
    # all groups that do no harm alone.
    name: str
    options: Mapping[str, str]  # options by name
    report: CompileReport | None  # the compiled step; None if the compiler has refused the flags
    error: str = ""  # what the compiler said; "" if it has compiled the step


def probe_groups(
    compile_with: Callable[[Mapping[str, str]], CompileReport],
    groups: Mapping[str, Mapping[str, str]],
    defaults: Mapping[str, str],
    errors: tuple[type[Exception], ...],
) -> Iterator[ProbedGroup]:
    """Compiles a step without flags, with the defaults, with each group alone, and with several.

    Those are combined with which a step takes no longer, and little more memory, than without.
    """
    option_sets: dict[str, Mapping[str, str]] = {NO_FLAGS: {}}
    if defaults:
        option_sets[DEFAULTS] = defaults
    option_sets |= {name: options for name, options in groups.items() if options != defaults}
    plain, harmless = None, {}

    def probe(name: str, options: Mapping[str, str]) -> ProbedGroup:
        try:
            return ProbedGroup(name, options, compile_with(options))
        except errors as error:
            return ProbedGroup(name, options, None, str(error).splitlines()[0])

    for name, options in option_sets.items():
        group = probe(name, options)
        yield group
        if name == NO_FLAGS:
            plain = group.report
        elif name != DEFAULTS and _does_no_harm(group.report, plain):
            harmless[name] = options
    together = {name: value for options in harmless.values() for name, value in options.items()}
    if len(harmless) > 1 and together != defaults:
        yield probe(TOGETHER, together)


def _does_no_harm(report: CompileReport | None, plain: CompileReport | None) -> bool:
    """Returns whether a step with a group is as fast as without, and not much larger."""
    if report is None or plain is None or report.step_time is None or plain.step_time is None:
        return False
    is_small = report.memory.peak_bytes <= MEMORY_FACTOR * plain.memory.peak_bytes
    return is_small and report.step_time.seconds <= plain.step_time.seconds


def probe_text(probed: Sequence[ProbedGroup]) -> str:
    """Returns a table of the groups, with their memory, time and collectives."""
    reports = [(group.name, group.report) for group in probed if group.report is not None]
    kinds = list(dict.fromkeys(kind for _, report in reports for kind in totals(report.audit)))
    heads = ("flags", "compile s", "peak MB", "step s", "exposed s")
    rows = [(*heads, *kinds)]
    rows += [(name, *_figures(report), *_moved(report, kinds)) for name, report in reports]
    title = "collectives: GB of results per device and step (of them async, hidden)"
    return "\n".join([title, *align(rows), "", *_options(probed)])


def _figures(report: CompileReport) -> tuple[str, ...]:
    time = report.step_time
    seconds = ("-", "-") if time is None else (f"{time.seconds:.4f}", f"{time.exposed:.4f}")
    peak = f"{report.memory.peak_bytes / 1e6:,.1f}"
    return (f"{report.compile_seconds:.1f}", peak, *seconds)


def _moved(report: CompileReport, kinds: Sequence[str]) -> Iterator[str]:
    by_kind, hidden = totals(report.audit), report.hidden_bytes()
    for kind in kinds:
        if kind not in by_kind:
            yield "-"
            continue
        moved = by_kind[kind]
        sizes = moved.result_bytes, moved.asynchronous_bytes, hidden[kind]
        yield "{:.3f} ({:.3f}, {:.3f})".format(*(size / 1e9 for size in sizes))


def _options(probed: Sequence[ProbedGroup]) -> Iterator[str]:
    for group in probed:
        if group.options:
            yield f"{group.name}:"
            yield from (f"  --{name}={value}" for name, value in group.options.items())
        if group.error:
            yield f"  REFUSED: {shorten(group.error, 300)}"


def probe_json(probed: Sequence[ProbedGroup]) -> list[dict[str, Any]]:
    """Returns the groups for JSON."""
    return [_group_json(group) for group in probed]


def _group_json(group: ProbedGroup) -> dict[str, Any]:
    record: dict[str, Any] = {"flags": group.name, "options": dict(group.options)}
    if group.report is None:
        return record | {"error": group.error}
    time = group.report.step_time
    return record | {
        "compile_seconds": group.report.compile_seconds,
        "memory": dataclasses.asdict(group.report.memory),
        "step_seconds": None if time is None else time.seconds,
        "exposed_seconds": None if time is None else time.exposed,
        "totals": {
            kind: dataclasses.asdict(moved) for kind, moved in totals(group.report.audit).items()
        },
    }
