"""Takes sown values out of a stage and puts them into the module of all stages.

Under `nnx.capture`, modules store sown values in `__captures__`, separately from their variables.
Otherwise each `sow` creates a variable: an `nnx.Intermediate`, or a variable that holds a tuple.
"""

from typing import Any

from flax import nnx
from jaxtyping import PyTree


def is_sown(path: Any, variable: Any) -> bool:
    """Returns whether `sow` created a variable: it is an `nnx.Intermediate` or holds a tuple."""
    del path
    if isinstance(variable, nnx.Perturbation):
        return False
    return isinstance(variable, nnx.Intermediate) or isinstance(variable.get_value(), tuple)


def captured_types(layers: nnx.Module) -> tuple[type[nnx.Variable], ...]:
    """Returns the types that an `nnx.capture` around the pipeline asks for, or ()."""
    types = tuple(type(variable) for variable in getattr(layers, "__captures__", ()))
    if nnx.Perturbation in types:
        raise ValueError(
            "`nnx.capture` asks for `nnx.Perturbation`. A pipeline hands no values from outside to "
            "single microbatches: capture `nnx.Intermediate`, or differentiate by the inputs."
        )
    return types


def without_sown(layers: nnx.Module) -> nnx.Module:
    """Returns a copy of the module without sown values; the copy shares the arrays."""
    layers = nnx.clone(layers)
    for _, module in nnx.iter_modules(layers):
        if hasattr(module, "__captures__"):
            delattr(module, "__captures__")
    nnx.pop(layers, is_sown)
    return layers


def call(stage: nnx.Module, types: tuple, *arguments: Any) -> tuple[Any, PyTree]:
    """Returns the stage's result and the values that it sows."""
    if not types:
        return stage(*arguments), nnx.pop(stage, is_sown)  # type: ignore[operator]
    y, *sown = nnx.capture(stage, *types)(*arguments)
    return y, nnx.merge_state(*sown)


def store(layers: nnx.Module, sown: PyTree) -> None:
    """Stores the sown values of all stages where each module would have stored its own."""
    if not captured_types(layers):
        nnx.pop(layers, is_sown)
        nnx.update(layers, sown)
        return
    for path, variable in nnx.to_flat_state(sown):
        owner: Any = layers
        for name in path[:-1]:
            owner = getattr(owner, name) if isinstance(name, str) else owner[name]
        owner.sow(type(variable), path[-1], variable.get_value(), lambda _, new: new)
