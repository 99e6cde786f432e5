"""The front door's model of an Equinox module: its call, cut at a list of layers."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..api import Model
from ..api.cut import (
    CutModule,
    LayerCall,
    cut_model,
    cut_stack_or_calls,
    is_setting,
    num_stacked,
    read_setting,
    refuse_state,
    shape_of,
)


def model(
    module: Any,
    *,
    layers: str | Callable[[Any], Any] | Sequence[str | Callable[[Any], Any]] = "blocks",
    loss: Callable[..., Any],
    call: Callable[..., Any] | None = None,
    batch: PyTree = None,
    vmap: bool = True,
    output: Callable[..., Any] | None = None,
) -> tuple[Model, Any]:
    """Makes a model for `jaxpipe.pipeline` of a module, which stays as it is.

    Args:
        module: The module. Its call runs the layers in order, as `layer(x, ...)`. Its parameters
            may be shapes, as `eqx.filter_eval_shape` makes them.
        layers: The attribute with the list or tuple of layers, such as "blocks" or
            "decoder.blocks", or a function from the module to it, as for `eqx.tree_at`. Or a stack
            of layers, one module of arrays [L, ...], which the call runs by `jax.lax.scan`; or one
            module that is called several times, a layer in each call. Several of these, such as
            ("blocks", "shared_block"), if layers are calls of the modules in all of them.
        loss: `(outputs of the module [rows, ...], batch) -> loss`: a scalar, the mean over rows, or
            `jp.Weighted(total, weight)`; with metrics as `(loss, {name: metric})`, scalars or
            arrays [rows, ...].
        call: `(module, one row of the batch) -> output`, or `(module, row, key) -> output` with a
            dropout key; a layer is then given a key of its own as `key=`. Default: `module(row)`.
        batch: An example of a batch, arrays or shapes. With it everything is checked at once,
            layers may differ and read what any layer before them has returned, and parameters
            outside of layers belong to the embedding or to the loss, as the call uses them. Without
            it both have all of them, which costs an engine of several programs memory and a
            transfer.
        vmap: Whether `call` takes one row; otherwise it takes the batch.
        output: `(outputs of the module [rows, ...], batch) -> arrays [rows, ...]`, which
            `pipe.apply` returns. Default: all that the module returns.

    Returns:
        (the model, the module's parameters: `eqx.filter(module, eqx.is_inexact_array)`).
        `eqx.combine(pipe.unshard(params), module)` is the module with trained parameters. A layer
        may return `(x, aux)`, if the loss depends on aux, arrays or scalars in any structure, by
        adding them up times constants.

    Raises:
        ValueError: If layers have state; or without `batch` if they differ in more than parameters,
            or something runs between them.
    """
    params = eqx.filter(module, _is_parameter)
    call = call or (lambda module, row: module(row))
    several = layers if isinstance(layers, Sequence) and not isinstance(layers, str) else None
    selectors: list[Any] = [
        attrgetter(name) if isinstance(name, str) else name
        for name in ([layers] if several is None else several)
    ]

    def plain(params: Any, batch: PyTree) -> Any:
        run = partial(call, eqx.combine(params, module))
        return loss((jax.vmap(run) if vmap else run)(batch), batch)

    def of_calls() -> Model:
        cut = _cut(module, params, selectors, call, vmap, by_calls=several is not None)
        return cut_model(cut, loss, batch, output, plain)

    def of_stack() -> Model:
        cut = _cut_stack(module, params, selectors[0], call, vmap)
        return cut_model(cut, loss, batch, output, plain, stacked=True)

    if several is not None or not isinstance(selectors[0](module), eqx.Module):
        return of_calls(), params
    return cut_stack_or_calls(of_stack, of_calls, batch), params


def _is_parameter(leaf: Any) -> bool:
    """Returns whether a leaf of a module is an inexact array, or the shape of one."""
    is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
    return jnp.issubdtype(leaf.dtype, jnp.inexact) if is_shape else eqx.is_inexact_array(leaf)


def _cut_stack(module: Any, params: Any, where: Callable, call: Callable, vmap: bool) -> CutModule:
    """Returns the module and its stack of layers, for a cut at the scan over them."""
    _check_no_state(module)
    takes_key = len(inspect.signature(call).parameters) == 3
    stack = _by_name(where(params))
    names = [f"layers[{i}]" for i in range(num_stacked(stack))]

    def split(tree: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return _by_name(tree, [where(tree)]), _by_name(where(tree))

    def with_values(tree: Any, outer: dict[str, Any], stack: dict[str, Any]) -> Any:
        whole = _with_values(where(tree), stack)
        return eqx.tree_at(where, _with_values(tree, outer), whole)

    def run(outer: Any, stack: Any, batch: PyTree, key: Any) -> Any:
        filled = with_values(module, dict(outer), dict(stack))
        return call(filled, batch, key) if takes_key else call(filled, batch)

    outer = jax.tree.map(shape_of, _by_name(params, [where(params)]))
    return CutModule(
        run=run,
        split=split,
        join=partial(with_values, params),
        outer=outer,
        layers=jax.tree.map(shape_of, stack),
        names=names,
        takes_key=takes_key,
        by_row=vmap,
    )


def _cut(
    module: Any,
    params: Any,
    selectors: list[Callable[[Any], Any]],
    call: Callable,
    vmap: bool,
    *,
    by_calls: bool,
) -> CutModule:
    for select in selectors:
        target = select(module)
        if not isinstance(target, eqx.Module) and not (isinstance(target, list | tuple) and target):
            raise ValueError(
                f"`layers` names {type(target).__name__}. Give the attribute with the list or "
                "tuple of layers, or a function from the module to it."
            )
    _check_no_state(module)
    takes_key = len(inspect.signature(call).parameters) == 3
    targets = [select(module) for select in selectors]
    is_module = [isinstance(target, eqx.Module) for target in targets]
    modules = [layer for target in targets for layer in _as_list(target)]

    named = jax.tree_util.tree_leaves_with_path(
        module, is_leaf=lambda node: any(node is target for target in targets)
    )
    for target in targets:
        paths = [jax.tree_util.keystr(path) for path, leaf in named if leaf is target]
        if len(paths) > 1:
            raise ValueError(
                f"`layers` names what is in several places of the module, {', '.join(paths)}. "
                "Equinox makes them copies, with parameters of their own: store it in one "
                "attribute, and call that several times."
            )

    def groups(tree: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        subtrees = [select(tree) for select in selectors]
        layers = [_by_name(layer) for target in subtrees for layer in _as_list(target)]
        return _by_name(tree, subtrees), layers

    outer, layers = groups(params)
    names = [list(outer), *map(list, layers)]

    def split(tree: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        outer, layers = groups(tree)
        if [list(outer), *map(list, layers)] != names:
            raise ValueError(
                "`params` is not the tree of parameters that `jaxpipe.equinox.model` returned."
            )
        return outer, layers

    def join(outer: dict[str, Any], layers: list[dict[str, Any]]) -> Any:
        new, subtrees = iter(layers), [select(params) for select in selectors]
        whole = [
            _as_target(target, [_with_values(old, next(new)) for old in _as_list(target)])
            for target in subtrees
        ]
        outer = {name: outer[name] for name in _by_name(params, subtrees)}
        return _with_values(params, outer, subtrees, whole)

    def run(outer: Any, layers: dict[int, Any], batch: PyTree, key: Any, hook: Callable) -> Any:
        hooks = iter(
            [_EquinoxHook(i, hook, layer, layers.get(i, {})) for i, layer in enumerate(modules)]
        )
        stand_ins = [
            _as_target(target, [next(hooks) for _ in _as_list(target)]) for target in targets
        ]
        with_hooks = _with_values(module, outer, targets, stand_ins)
        return call(with_hooks, batch, key) if takes_key else call(with_hooks, batch)

    layer_names: list[str] = []
    for n, target in enumerate(targets):
        name = "layers" if len(targets) == 1 else f"layers[{n}]"
        layer_names += [name] if is_module[n] else [f"{name}[{i}]" for i in range(len(target))]
    return CutModule(
        run=run,
        split=split,
        join=join,
        outer=jax.tree.map(shape_of, outer),
        layers=jax.tree.map(shape_of, layers),
        names=layer_names,
        takes_key=takes_key,
        by_row=vmap,
        by_calls=by_calls or any(is_module),
    )


def _as_list(target: Any) -> Sequence[Any]:
    return [target] if isinstance(target, eqx.Module) else target


def _as_target(target: Any, layers: list[Any]) -> Any:
    """Returns layers in place of those of a target: one module, or a list or tuple of them."""
    return layers[0] if isinstance(target, eqx.Module) else type(target)(layers)


def _with_values(
    tree: Any, values: dict[str, Any], targets: Sequence[Any] = (), new: Sequence[Any] = ()
) -> Any:
    """Returns a tree with other nodes in place of `targets`, and values by path elsewhere."""

    def replacement(path: Any, node: Any) -> Any:
        at = next((i for i, target in enumerate(targets) if node is target), None)
        return values.get(jax.tree_util.keystr(path), node) if at is None else new[at]

    return jax.tree_util.tree_map_with_path(
        replacement, tree, is_leaf=lambda node: any(node is target for target in targets)
    )


class _EquinoxHook:
    """Stands for a layer in the list of layers."""

    def __init__(self, index: int, hook: Callable, layer: Any, weights: dict[str, Any]):
        self._index, self._hook, self._layer, self._weights = index, hook, layer, weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        static = jax.tree.flatten(eqx.filter(self._layer, _is_parameter, inverse=True))
        call = LayerCall(
            self._index,
            args,
            kwargs,
            self._run,
            static,
            attributes=lambda: {"class": type(self._layer).__name__, **_settings(self._layer)},
        )
        return self._hook(call)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return _with_values(self._layer, self._weights)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return read_setting(self._layer, name)

    @property
    def __class__(self) -> Any:  # for `isinstance` in the call of the module
        return type(self._layer)


def _settings(module: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the settings of a module, and of those in its fields, by their paths."""
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(module):
        value = getattr(module, field.name, None)
        if isinstance(value, eqx.Module):
            settings |= _settings(value, f"{prefix}{field.name}.")
        elif is_setting(value):
            settings[f"{prefix}{field.name}"] = value
    return settings


def _by_name(tree: Any, skipped: Sequence[Any] = ()) -> dict[str, Any]:
    """Returns the inexact arrays of a tree by their paths, without those in `skipped`."""

    def is_skipped(node: Any) -> bool:
        return any(node is other for other in skipped)

    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_skipped)
    return {jax.tree_util.keystr(path): leaf for path, leaf in flat if not is_skipped(leaf)}


def _check_no_state(module: Any) -> None:
    def is_state(node: Any) -> bool:
        return isinstance(node, eqx.nn.StateIndex)

    flat, _ = jax.tree_util.tree_flatten_with_path(module, is_leaf=is_state)
    stateful = [jax.tree_util.keystr(path) for path, node in flat if is_state(node)]
    refuse_state(stateful)
