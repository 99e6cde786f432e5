"""Selects the compiler flags of a step from the table of flags, and prints which, and why."""

import importlib.metadata
import logging
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import jax

from ...devices import num_cores

_LOG = logging.getLogger("jaxpipe.xla")


@dataclass(frozen=True)
class StepTraits:
    """What the choice of flags depends on."""

    platform: str  # the platform of the devices: `tpu`, `gpu` or `cpu`
    device_kind: str  # their `device_kind` in JAX, such as "TPU v5"
    engine: str  # the name of the engine, for the reader
    pipelines: bool = True  # whether ranks run stages of the model
    program_per_rank: bool = False  # whether ranks run programs of their own
    deterministic: bool = False  # whether results must be equal bit for bit in every run
    has_experts: bool = False  # whether a router sends tokens to experts
    sequence_parallel: bool = False  # whether `tensor` divides sequences between products
    cores: int = field(default_factory=num_cores)  # that this process may use
    # Bytes of the whole weights of one layer in the dtype of computation; 0 if they are unknown.
    layer_bytes: int = 0
    # Which rows of the table may be set: "all", "quick" for those that do not make compilation
    # slower, or "none".
    default_flags: Literal["all", "quick", "none"] = "all"


Predicate = Callable[[StepTraits], bool]


def never(traits: StepTraits) -> bool:
    """Returns False: the flag of this row is compiled only by `jaxpipe compile --probe-flags`."""
    del traits
    return False


@dataclass(frozen=True)
class CompilerFlag:
    """A row of the table."""

    group: str  # the name of the flags that are probed together
    option: str  # the name of the flag without dashes
    value: str | Callable[[StepTraits], str]  # its value, or a function that returns it
    platform: str  # the platform whose compiler has the flag
    reason: str  # why it is set, or why it is not
    # The versions of the compiler that accepted it: of libtpu for TPUs, of JAX for others.
    accepted_by: tuple[str, ...]
    # Whether a step of these traits is compiled with the flag.
    is_default: Predicate = lambda traits: True
    # The kinds of devices that it is meant for; () for all of the platform.
    device_kinds: tuple[str, ...] = ()
    # Whether it is set whatever `default_flags` says: the caller has asked for what it does.
    is_required: bool = False
    gain: str = ""  # what a measurement says that it changes; "" if nothing was measured
    ran_on_device: bool = False  # whether a program with it has run on a device of the platform
    slows_compilation: bool = False  # whether compilation takes more than a quarter longer with it
    # Kinds of devices for which the compiler does so by itself.
    built_in: tuple[str, ...] = ()

    def suits(self, traits: StepTraits) -> bool:
        """Returns whether the compiler of these devices has the flag."""
        is_kind = not self.device_kinds or traits.device_kind in self.device_kinds
        return self.platform == traits.platform and is_kind

    def is_set(self, traits: StepTraits) -> bool:
        """Returns whether a step of these traits is compiled with it, unless that is refused."""
        level = traits.default_flags
        is_allowed = level == "all" or (level == "quick" and not self.slows_compilation)
        return self.suits(traits) and self.is_default(traits) and (is_allowed or self.is_required)

    def has_effect(self, traits: StepTraits) -> bool:
        """Returns whether a step is compiled as this flag says, also if it is not set."""
        return self.is_set(traits) or traits.device_kind in self.built_in

    def value_for(self, traits: StepTraits) -> str:
        """Returns the value for a step of these traits."""
        return self.value if isinstance(self.value, str) else self.value(traits)


def compiler_version(platform: str) -> str:
    """Returns the version of libtpu or of JAX; "" if libtpu does not tell it."""
    if platform != "tpu":
        return jax.__version__
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return ""


def is_tried(flag: CompilerFlag, version: str) -> bool:
    """Returns whether a version, but for its last number, is known to accept a flag."""
    return _series(version) in map(_series, flag.accepted_by)


def _series(version: str) -> tuple[str, ...]:
    """Returns the parts that name a series: 0.10 of JAX's 0.10.2, 0.0.48 of libtpu's 0.0.48.1."""
    parts = version.split(".")
    return tuple(parts[:3] if parts[:2] == ["0", "0"] else parts[:2])


def default_options(
    flags: tuple[CompilerFlag, ...], traits: StepTraits, device: Any
) -> dict[str, str]:
    """Returns the `compiler_options` that a step of these traits is compiled with."""
    # A compiler that is in no row's `accepted_by` may have lost an option, which would end the run:
    # it is asked first. If it refuses, only the flags that are required are left, and a warning
    # says so.
    version = compiler_version(traits.platform)
    rows = [flag for flag in flags if flag.is_set(traits)]
    options = {flag.option: flag.value_for(traits) for flag in rows}
    if all(is_tried(flag, version) for flag in rows):
        return options
    refusal = _refusal(device, tuple(options.items()))
    if not refusal:
        return options
    _LOG.warning("Programs are compiled without jaxpipe's default flags: %s", refusal)
    return {flag.option: flag.value_for(traits) for flag in rows if flag.is_required}


@cache
def _refusal(device: Any, options: tuple[tuple[str, str], ...]) -> str:
    """Returns the error of a compiler that does not take some options, or ""."""
    if not isinstance(device, jax.Device):
        return ""  # a description of a device, which the planner has: nothing is compiled
    if device.process_index != jax.process_index():  # a program needs a device of this process
        device = jax.local_devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    scalar = jax.ShapeDtypeStruct((), "float32", sharding=sharding)
    try:
        jax.jit(lambda x: x, compiler_options=dict(options)).lower(scalar).compile()
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return ""


def option_groups(
    flags: tuple[CompilerFlag, ...], traits: StepTraits
) -> Mapping[str, Mapping[str, str]]:
    """Returns the options of every group that the compiler of these devices has."""
    groups: dict[str, dict[str, str]] = {}
    for flag in flags:
        if flag.suits(traits):
            groups.setdefault(flag.group, {})[flag.option] = flag.value_for(traits)
    return groups


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
    table_options = {flag.option for flag in rows}
    for option, value in user_options.items():
        if option not in table_options:
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
