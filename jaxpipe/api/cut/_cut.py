"""Cuts the call of a library's module at its layers: embedding, one layer and loss as functions.

The module's call runs with a hook in place of every layer. For the embedding the hook ends the call
at the first layer, and takes the arguments of this layer. For a layer it ends it there too, after
the layer has run on other arguments. For the loss every layer returns what left the last one. What
a part does not need of the call is removed from its program.

Layers that form a chain are in `_hooks`, and those that read more than the one before has returned
in `_branches`. What layers return besides x is in `_parts`, and layers that run in a `lax.scan` are
in `_scan`. A module that is called several times is a layer in each call: its parameters are
outside of layers, where all of its calls read them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import jax
from jaxtyping import PyTree

from .._layouts import layer_flops
from .._model import Model, ModelFunction
from .._pieces import shape_of
from ._branches import BranchParts
from ._hooks import HookParts
from ._layer_calls import (
    LayerCall,
    NoChainError,
    arguments_of,
    shapes_of,
    stand_in,
    x_and_extras,
    zeros_of,
)
from ._parts import CutModule, Outer, Parts, shape_of_key
from ._scan import ScanParts


def cut_model(
    cut: CutModule,
    loss: Callable,
    batch: PyTree | None,
    output: Callable | None = None,
    plain: Callable | None = None,
    *,
    stacked: bool = False,
) -> Model:
    """Makes the model of a module.

    Args:
        loss: `(output of the module, batch) -> loss` of `Model.loss`.
        output: `(output of the module, batch) -> arrays [rows, ...]` that `apply` returns. None:
            the output of the module.
        plain: `(params, batch) -> loss` of the module's own call.
        batch: An example of a batch, arrays or shapes. With it parameters outside of layers are
            divided into those of the embedding and those of the loss, kinds of layers are found,
            and everything is checked at once; without it both parts have all of them, layers are
            of one kind, and the first batch is checked.
        stacked: Whether `cut` is that of a scan over a stack of layers.

    Returns:
        A model whose functions run parts of the module, and whose `to_groups` takes its parameters.
    """
    if cut.by_calls:
        cut = _layers_by_calls(cut, batch)
    parts: Parts = (ScanParts if stacked else HookParts)(cut, loss, output)
    embedded, headed = (set(cut.outer) - cut.shared for _ in range(2))
    keyed, names = [cut.takes_key] * 4, ["layer"]
    if batch is not None:
        batch = jax.tree.map(shape_of, batch)
        try:
            parts, names = parts.with_kinds(batch)
        except NoChainError:
            parts, names = BranchParts(cut, loss, output).with_kinds(batch)
            cut = parts.cut
        embedded, headed, keyed = parts.uses(batch)
    both = sorted(cut.shared & (embedded | headed))
    if both:
        raise ValueError(
            f"Layers share the parameters {', '.join(both[:8])}, which the module reads before or "
            "behind them too. Pass what a layer needs of them as an argument, or as a part of x. "
            "If they are a module's that is called several times, name it too: `layers=('blocks', "
            "'shared_block')`."
        )
    tied = bool(embedded & headed)
    in_head = set() if tied and batch is None else headed - embedded

    def embed(w: Any, batch: PyTree, key: Any) -> Any:
        return parts.embed(w, batch, key)

    def layer(kind: int) -> ModelFunction:
        def run(w: Any, x: PyTree, batch: PyTree, key: Any) -> Any:
            own, shared = (w["layer"], w["shared"]) if cut.shared else (w, {})
            return parts.layer(own, shared, x, batch, key, kind)

        return ModelFunction(run, keyed[1 + kind])

    def loss_of(w: Any, x: PyTree, batch: PyTree, key: Any) -> Any:
        return parts.loss_of(w["embed"] | w["head"] if tied else w, x, batch, key)

    def output_of(w: Any, x: PyTree, batch: PyTree, key: Any) -> PyTree:
        return parts.output_of(w["embed"] | w["head"] if tied else w, x, batch, key)

    def to_groups(params: PyTree) -> dict[str, PyTree]:
        outer, layers = cut.split(params)
        head = {name: leaf for name, leaf in outer.items() if name in in_head}
        shared = {name: leaf for name, leaf in outer.items() if name in cut.shared}
        rest = {n: leaf for n, leaf in outer.items() if n not in head and n not in shared}
        groups = {"embed": rest, "layers": layers, "head": head}
        return groups | {"shared": shared} if shared else groups

    def from_groups(groups: dict[str, PyTree]) -> PyTree:
        outer = groups["embed"] | groups["head"] | groups.get("shared", {})
        return cut.join(outer, groups["layers"])

    has_kinds = len(names) > 1
    model = Model(
        embed=ModelFunction(embed, keyed[0]),
        layer={name: layer(kind) for kind, name in enumerate(names)} if has_kinds else layer(0),
        loss=ModelFunction(loss_of, keyed[-2]),
        tied=tied,
        to_groups=to_groups,
        from_groups=from_groups,
        shared=bool(cut.shared),
        output=ModelFunction(output_of, keyed[-1]),
        plain=plain,
        order=[names[kind] for kind in parts.kinds] if has_kinds else None,
    )
    if not has_kinds:
        return model
    params = jax.eval_shape(cut.join, cut.outer, cut.layers)
    return replace(model, layer_costs=layer_flops(model, params, batch))


def cut_stack_or_calls(
    stack: Callable[[], Model], calls: Callable[[], Model], batch: PyTree | None
) -> Model:
    """Returns the model of a module whose layers are in one submodule.

    It is a stack that the call scans over, or else, if `stack` raises a `ValueError`, one layer
    that is called several times.
    """
    try:
        return stack()
    except ValueError as error:
        if batch is None:
            raise ValueError(
                f"{error} If it is one module, which is called several times, give `batch=`, an "
                "example of a batch, by which its calls are found."
            ) from error
        try:
            return calls()
        except Exception as other:  # the user's module runs with a stand-in, and may raise anything
            raise ValueError(
                f"`layers` names one module. As a stack of layers: {error} As a layer that is "
                f"called several times: {other}"
            ) from other


def _layers_by_calls(cut: CutModule, batch: PyTree | None) -> CutModule:
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
