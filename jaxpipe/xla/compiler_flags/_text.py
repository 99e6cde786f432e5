"""Prints which compiler flags a step is compiled with, and why."""

import textwrap
from collections.abc import Iterator, Mapping

from ._flag import CompilerFlag, StepTraits, compiler_version, is_tried


def flags_text(
    flags: tuple[CompilerFlag, ...], traits: StepTraits, user_options: Mapping[str, str]
) -> str:
    """Returns the flags of a step, and the rows of the table that are not set, with the reasons."""
    version = compiler_version(traits.platform)
    compiler = "libtpu" if traits.platform == "tpu" else "jax"
    rows = [flag for flag in flags if flag.suits(traits)]
    lines = [f"{traits.device_kind}, engine {traits.engine}, {compiler} {version or 'unknown'}"]
    known = {flag.option for flag in rows}
    for option, value in user_options.items():
        if option not in known:
            lines.append(f"set      --{option}={value} (yours)")
    for flag in rows:
        lines += _row(flag, traits, user_options, version, compiler)
    if len(lines) == 1:
        lines.append("no flags")
    return "\n".join(lines)


def _row(
    flag: CompilerFlag,
    traits: StepTraits,
    user_options: Mapping[str, str],
    version: str,
    compiler: str,
) -> Iterator[str]:
    value, is_default = flag.value_for(traits), flag.is_default(traits)
    remark = ""
    if flag.option in user_options:
        is_set, value, remark = True, user_options[flag.option], " (yours)"
    else:
        is_set = is_default and is_tried(flag, version)
        if is_default and not is_set:
            remark = f" (not tried with {compiler} {version or 'of this name'})"
    yield f"{'set' if is_set else 'not set':<8} --{flag.option}={value}{remark}"
    accepted = f"Accepted by {compiler} {', '.join(flag.accepted_by)}."
    yield textwrap.fill(
        f"{flag.group}: {flag.reason} {accepted}",
        width=100,
        initial_indent=" " * 9,
        subsequent_indent=" " * 9,
        break_long_words=False,
        break_on_hyphens=False,
    )
