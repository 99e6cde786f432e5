"""Checks the types of the package: by jaxtyping where an annotation has shapes, else by beartype.

jaxtyping binds the arguments of every call to their names and checks them twice, so that shapes
agree with one another. Most functions name no shape: beartype alone checks the same of them.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, ForwardRef, get_args

import jaxtyping
from beartype import beartype

PACKAGES = (
    *("schedules", "sharding", "ir", "autodiff", "spmd", "compat", "linen", "nnx", "xla"),
    *("models", "mpmd", "data", "train", "hugging_face", "report", "cost"),
)
_jaxtyped: Any = jaxtyping.jaxtyped


def install_hook() -> None:
    """Decorates the functions and dataclasses of the package when they are defined."""
    jaxtyping.jaxtyped = _checked  # by this name the hook decorates
    packages = [f"jaxpipe.{package}" for package in PACKAGES]
    jaxtyping.install_import_hook(packages, "beartype.beartype")


def _checked(*, typechecker: Callable) -> Callable:
    def decorate(defined: Any) -> Any:
        if any(_has_shape(hint) for hint in inspect.get_annotations(defined).values()):
            return _jaxtyped(defined, typechecker=typechecker)
        if not inspect.isclass(defined):
            return beartype(defined)
        if dataclasses.is_dataclass(defined) and "__init__" in vars(defined):
            defined.__init__ = beartype(defined.__init__)
        return defined

    return decorate


def _has_shape(hint: Any) -> bool:
    """Tells whether a part of an annotation is jaxtyping's, or in quotes, which hide what it is."""
    if isinstance(hint, str | ForwardRef) or getattr(hint, "__module__", "").startswith(
        "jaxtyping"
    ):
        return True
    parts = hint if isinstance(hint, list) else get_args(hint)
    return any(_has_shape(part) for part in parts)
