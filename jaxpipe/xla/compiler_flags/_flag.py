"""Selects the compiler flags of a step from the table of flags."""

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class StepTraits:
    """What the choice of flags depends on.

    Attributes:
        platform: The platform of the devices: `tpu`, `gpu` or `cpu`.
        device_kind: Their `device_kind` in JAX, such as "TPU v5".
        engine: The name of the engine, for the reader.
        program_per_rank: Whether ranks run programs of their own.
        forwarding_delay: Whether activations are handed over one tick late.
        deterministic: Whether results must be equal bit for bit in every run.
        layer_bytes: Bytes of the whole weights of one layer in the dtype of computation; 0 if they
            are unknown.
    """

    platform: str
    device_kind: str
    engine: str
    program_per_rank: bool = False
    forwarding_delay: bool = False
    deterministic: bool = False
    layer_bytes: int = 0


def _always(traits: StepTraits) -> bool:
    del traits
    return True


def never(traits: StepTraits) -> bool:
    """Returns False: the flag of this row is compiled only by `jaxpipe compile --probe-flags`."""
    del traits
    return False


@dataclass(frozen=True)
class CompilerFlag:
    """A row of the table.

    Attributes:
        group: The name of the flags that are probed together.
        option: The name of the flag without dashes.
        value: Its value, or a function that returns it.
        platform: The platform whose compiler has the flag.
        reason: Why it is set, or why it is not, with the measurement.
        accepted_by: The versions of the compiler that accepted it: of libtpu for TPUs, of JAX for
            others.
        is_default: Whether a step of these traits is compiled with the flag.
        device_kinds: The kinds of devices that it is meant for; () for all of the platform.
        is_required: Whether it is set also where the compiler's version is not one of
            `accepted_by`, because the caller has asked for what it does.
    """

    group: str
    option: str
    value: str | Callable[[StepTraits], str]
    platform: str
    reason: str
    accepted_by: tuple[str, ...]
    is_default: Callable[[StepTraits], bool] = _always
    device_kinds: tuple[str, ...] = ()
    is_required: bool = False

    def suits(self, traits: StepTraits) -> bool:
        """Returns whether the compiler of these devices has the flag."""
        is_kind = not self.device_kinds or traits.device_kind in self.device_kinds
        return self.platform == traits.platform and is_kind

    def value_for(self, traits: StepTraits) -> str:
        """Returns the value for a step of these traits."""
        return self.value if isinstance(self.value, str) else self.value(traits)


def compiler_version(platform: str) -> str:
    """Returns the version of the compiler, as `accepted_by` has it.

    Returns:
        The version of libtpu or of JAX; "" if libtpu does not tell it.
    """
    if platform != "tpu":
        return jax.__version__
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return ""


def is_tried(flag: CompilerFlag, version: str) -> bool:
    """Returns whether a default is set with a version of the compiler.

    An unknown option ends the compilation, so a default is left out where it was not tried, unless
    it is required. Versions that differ in their last number are taken as equal.
    """
    return flag.is_required or _series(version) in map(_series, flag.accepted_by)


def _series(version: str) -> tuple[str, ...]:
    """Returns the parts that name a series: 0.10 of JAX's 0.10.2, 0.0.48 of libtpu's 0.0.48.1."""
    parts = version.split(".")
    return tuple(parts[:3] if parts[:2] == ["0", "0"] else parts[:2])


def default_options(flags: tuple[CompilerFlag, ...], traits: StepTraits) -> dict[str, str]:
    """Returns the options that a step of these traits is compiled with.

    Returns:
        Options by name, as `jax.jit` takes them as `compiler_options`.
    """
    version = compiler_version(traits.platform)
    return {
        flag.option: flag.value_for(traits)
        for flag in flags
        if flag.suits(traits) and flag.is_default(traits) and is_tried(flag, version)
    }


def option_groups(
    flags: tuple[CompilerFlag, ...], traits: StepTraits
) -> Mapping[str, Mapping[str, str]]:
    """Returns the options of every group that the compiler of these devices has."""
    groups: dict[str, dict[str, str]] = {}
    for flag in flags:
        if flag.suits(traits):
            groups.setdefault(flag.group, {})[flag.option] = flag.value_for(traits)
    return groups
