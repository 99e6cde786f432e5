"""Prints the compiler flags of a step, and probes what each group of them changes."""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...train import Config
    from ...train.plan import Setup, StepPlan
    from ...xla.compile_report import CompileReport


def print_flags(config: "Config", device: Any) -> int:
    """Prints which flags a step is compiled with, and which not, with the reasons."""
    from ...train.config import parse_xla_flags
    from ...train.plan import step_traits
    from ...xla.compiler_flags import FLAGS, default_options, flags_text

    user_options = parse_xla_flags(config.compile_xla_flags)
    traits = step_traits(config, device)
    print(flags_text(FLAGS, traits, default_options(FLAGS, traits, device), user_options))
    return 0


def probe_flags(
    setup: "Setup", compile_step: "Callable[[StepPlan], CompileReport]", *, as_json: bool
) -> int:
    """Compiles a step with several sets of flags, each with `compile_xla_flags`, and compares."""
    import jax

    from ...train.config import parse_xla_flags
    from ...train.plan import step_traits
    from ...xla import compiler_flags
    from ...xla.compiler_flags import FLAGS

    user_options = parse_xla_flags(setup.config.compile_xla_flags)
    device = setup.mesh.devices.flat[0]
    traits = step_traits(setup.config, device)

    def compile_with(options: Mapping[str, str]) -> "CompileReport":
        options = {**options, **user_options}
        told = dataclasses.replace(setup.step.pipe.told, compiler_options=tuple(options.items()))
        pipe = dataclasses.replace(setup.step.pipe, told=told)
        return compile_step(dataclasses.replace(setup.step, pipe=pipe))

    errors = jax.errors.JaxRuntimeError, RuntimeError, ValueError
    probed = []
    groups = compiler_flags.option_groups(FLAGS, traits)
    defaults = compiler_flags.default_options(FLAGS, traits, device)
    for group in compiler_flags.probe_groups(compile_with, groups, defaults, errors):
        print(f"{group.name}: {'compiled' if group.report else 'refused'}", file=sys.stderr)
        probed.append(group)
    if as_json:
        print(json.dumps(compiler_flags.probe_json(probed), indent=2))
    else:
        print(compiler_flags.probe_text(probed))
    return 1 if probed[0].report is None else 0
