"""Layers that are calls of modules: a module that is called several times is a layer in each call.

Its parameters are outside of layers, where all of its calls read them.
"""

from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import jax
from jaxtyping import PyTree

from .._pieces import shape_of
from ._layer_calls import LayerCall, arguments_of, shapes_of, stand_in, x_and_extras, zeros_of
from ._parts import CutModule, Outer, shape_of_key


def layers_by_calls(cut: CutModule, batch: PyTree | None) -> CutModule:
    """Returns the cut of a module whose layers are all calls of the modules that `cut` names."""
    if not cut.names:
        raise ValueError("`layers` names no modules. Name those whose calls are layers.")
    if batch is None:
        raise ValueError(
            f"`layers` names the modules {', '.join(cut.names[:8])}, whose calls say how many "
            "layers there are. Give `batch=`, an example of a batch."
        )
    calls = _calls(cut, batch)
    missing = [name for i, name in enumerate(cut.names) if i not in calls]
    if missing:
        raise ValueError(
            f"`layers` names {', '.join(missing[:8])}, which the call of the module does not call. "
            "Name modules whose calls are layers."
        )
    if len(calls) < 2:
        raise ValueError(
            f"{', '.join(cut.names)} is called once, and a pipeline needs at least two layers. "
            "Name the modules whose calls are layers, or the attribute with the list of layers."
        )
    shared = [i for i in range(len(cut.names)) if calls.count(i) != 1]

    def split(params: PyTree) -> tuple[dict[str, Any], list[Any]]:
        outer, of_modules = cut.split(params)
        moved = {_name(cut, i, leaf): of_modules[i][leaf] for i in shared for leaf in of_modules[i]}
        return outer | moved, [{} if i in shared else of_modules[i] for i in calls]

    def shared_weights(outer: Outer) -> dict[int, dict[str, Any]]:
        return {i: {leaf: outer[_name(cut, i, leaf)] for leaf in cut.layers[i]} for i in shared}

    def join(outer: dict[str, Any], layers: list[Any]) -> PyTree:
        of_modules = dict(zip(calls, layers, strict=True)) | shared_weights(outer)
        rest = {name: leaf for name, leaf in outer.items() if name in cut.outer}
        return cut.join(rest, [of_modules[i] for i in range(len(cut.names))])

    def run(outer: Any, layers: dict[int, Any], batch: PyTree, key: Any, hook: Any) -> Any:
        call_ids = count()

        def numbered_hook(call: LayerCall) -> Any:
            # Two modules of one class are told apart by the parameters that they share.
            module = call.index if call.index in shared else None
            return hook(replace(call, index=next(call_ids), static=[call.static, module]))

        own = {calls[i]: weights for i, weights in layers.items() if calls[i] not in shared}
        return cut.run(outer, own | shared_weights(outer), batch, key, numbered_hook)

    moved = {_name(cut, i, leaf): cut.layers[i][leaf] for i in shared for leaf in cut.layers[i]}
    names = [
        f"call {calls[:n].count(i)} of {cut.names[i]}" if i in shared else cut.names[i]
        for n, i in enumerate(calls)
    ]
    return replace(
        cut,
        run=run,
        split=split,
        join=join,
        outer=cut.outer | moved,
        layers=[{} if i in shared else cut.layers[i] for i in calls],
        names=names,
        shared=cut.shared | set(moved),
        by_calls=False,
    )


def _name(cut: CutModule, module: int, leaf: str) -> str:
    return f"{cut.names[module]}: {leaf}"


def _calls(cut: CutModule, batch: PyTree) -> list[int]:
    """Returns the module of every call, in order. Each runs once for x of some shapes."""
    calls: list[int] = []
    seen: list[tuple[Any, ...]] = []

    def hook(call: LayerCall) -> Any:
        at = arguments_of(call)
        x, form = at.x, at.form
        calls.append(call.index)
        known = next((s for s in seen if s[:2] == (call.index, form)), None)
        if known is None:
            result = x_and_extras(call.run(*call.args, **call.kwargs), x)
            known = call.index, form, *shapes_of(result)
            seen.append(known)
        y, extras = stand_in(known[2], x), zeros_of(known[3])
        return (y, *extras) if extras else y

    def run(outer: Outer, layers: list[PyTree], row: PyTree, key: Any) -> None:
        cut.run(outer, dict(enumerate(layers)), row, key, hook)

    row = jax.tree.map(partial(shape_of, skipped=int(cut.by_row)), batch)
    jax.eval_shape(run, cut.outer, cut.layers, row, shape_of_key(cut.takes_key))
    return calls
