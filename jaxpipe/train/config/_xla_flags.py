"""Options of XLA for the train step alone, written as flags are."""


def compiler_options(flags: str) -> dict[str, str]:
    """What `jax.jit` takes as `compiler_options`.

    Args:
        flags: Such as `--xla_a=true --xla_b=2`; `--xla_a` alone means true. XLA checks the names.

    Raises:
        ValueError: If a word is no flag, or one comes twice.
    """
    options: dict[str, str] = {}
    for word in flags.split():
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name or name in options:
            fault = "comes twice" if name in options else "is no flag"
            raise ValueError(
                f"`compile_xla_flags` is {flags!r}, in which {word!r} {fault}. Give flags such as "
                "--xla_a=true --xla_b=2, each once."
            )
        options[name] = value if equals else "true"
    return options
