"""The cut of an NNX module that scans over a stack of layers, such as `nnx.vmap` makes."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import PyTree

from ..api.cut import CutModule, num_stacked, refuse_state
from ..compat.maxtext.nnx import check_unchanged
from ._variables import (
    Path,
    flat_params,
    name_of,
    shape_of,
    values_by_name,
    with_values,
)


def cut_stack(module: nnx.Module, layers: str, call: Callable) -> CutModule:
    """Returns the module and its stack of layers, for a cut at the scan over them."""
    prefix = tuple(int(part) if part.isdigit() else part for part in layers.split("."))
    graph, state = nnx.split(module)
    kept = dict(nnx.to_flat_state(state))
    state = jax.tree.map(shape_of, state)
    params = nnx.state(nnx.merge(graph, state), nnx.Param)
    _check_variables(dict(nnx.to_flat_state(state)), prefix)
    constants = {
        path: kept[path]
        for path, v in nnx.to_flat_state(state)
        if not isinstance(v, nnx.Param | nnx.RngState)
    }
    split, join = _groups(params, prefix)
    outer, stack = split(params)
    count = num_stacked(stack)

    def run(outer: Any, stack: Any, batch: PyTree, key: Any) -> Any:
        values = dict(outer) | {f"{layers}.{name}": leaf for name, leaf in stack.items()}
        filled = with_values(state, values, key, constants)
        # Read before the call: the variables of the module are those of the state.
        before = values_by_name(filled)
        merged = nnx.merge(graph, filled)
        output = call(merged, batch)
        _check_unchanged(before, values_by_name(nnx.state(merged)), f"{layers}.")
        return output

    has_streams = any(isinstance(v, nnx.RngKey) for v in kept.values())
    names = [f"{layers}[{i}]" for i in range(count)]
    return CutModule(
        run=run,
        split=split,
        join=join,
        outer=outer,
        layers=stack,
        names=names,
        takes_key=has_streams,
    )


def _check_unchanged(before: dict[str, Any], after: dict[str, Any], stack: str) -> None:
    """Raises a `ValueError` if a call changes variables other than those that the scan returns."""
    old = {name: leaf for name, leaf in before.items() if not name.startswith(stack)}
    new = {n: leaf for n, leaf in after.items() if n in old or n not in before}
    check_unchanged(old, new)


def _check_variables(state: dict[Path, Any], prefix: Path) -> None:
    """Raises a `ValueError` if layers have state."""
    stateful = nnx.BatchStat | nnx.Cache | nnx.Intermediate
    names = [name_of(path) for path, v in state.items() if isinstance(v, stateful)]
    names += [
        f"{name_of(path)} ({type(v).__name__})"
        for path, v in state.items()
        if path[: len(prefix)] == prefix and not isinstance(v, nnx.Param | nnx.RngState | stateful)
    ]
    refuse_state(names)


def _groups(params: Any, prefix: Path) -> tuple[Callable, Callable]:
    """Returns a function that divides parameters into the stack and others, and its inverse."""
    template: Any = nnx.to_flat_state(params)
    size = len(prefix)

    def split(params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        flat = flat_params(params, {path for path, _ in template})
        outer = {name_of(p): v.get_value() for p, v in flat.items() if p[:size] != prefix}
        stack = {name_of(p[size:]): v.get_value() for p, v in flat.items() if p[:size] == prefix}
        return outer, stack

    def join(outer: dict[str, Any], stack: dict[str, Any]) -> Any:
        def value(path: Path) -> Any:
            is_layer = path[:size] == prefix
            return stack[name_of(path[size:])] if is_layer else outer[name_of(path)]

        return nnx.from_flat_state([(path, v.replace(value(path))) for path, v in template])

    return split, join
