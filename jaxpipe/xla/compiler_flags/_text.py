"""Prints which compiler flags a step is compiled with, and why."""

import textwrap
from collections.abc import Mapping

from ._flag import CompilerFlag, StepTraits, compiler_version, is_tried


def flags_text(
    flags: tuple[CompilerFlag, ...],
    traits: StepTraits,
    defaults: Mapping[str, str],
    user_options: Mapping[str, str],
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
    options = {**defaults, **user_options}
    for flag, following in zip(rows, [*rows[1:], None], strict=True):
        remark = ""
        if flag.option in user_options:
            remark = " (yours)"
        elif flag.is_set(traits) and flag.option not in defaults:
            remark = f" (refused by {compiler} {version or 'of this name'})"
        elif flag.is_set(traits) and not is_tried(flag, version):
            remark = f" (new to {compiler} {version or 'of this name'}, which accepts it)"
        value = options.get(flag.option, flag.value_for(traits))
        state = "set" if flag.option in options else "not set"
        lines.append(f"{state:<8} --{flag.option}={value}{remark}")
        if following is None or _reason(flag, compiler) != _reason(following, compiler):
            lines.append(_reason(flag, compiler))
    if len(lines) == 1:
        lines.append("no flags")
    return "\n".join(lines)


def _reason(flag: CompilerFlag, compiler: str) -> str:
    text = f"{flag.group}: {flag.reason}"
    text += f" Gain: {flag.gain}" if flag.gain else ""
    text += f" Accepted by {compiler} {', '.join(flag.accepted_by)}."
    text += "" if flag.ran_on_device else " Never run on a device."
    return textwrap.fill(
        text,
        width=100,
        initial_indent=" " * 9,
        subsequent_indent=" " * 9,
        break_long_words=False,
        break_on_hyphens=False,
    )
