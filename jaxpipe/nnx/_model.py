"""The front door's model of an NNX module: its call, cut at a list of layers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jaxtyping import PyTree

from ..api import Model
from ..api.cut import CutModule, LayerCall, cut_model, is_setting, read_setting
from ..compat.maxtext.nnx import check_unchanged
from ._stack import cut_stack
from ._variables import (
    Path,
    flat_params,
    name_of,
    shape_of,
    submodule,
    values_by_name,
    with_values,
)


def model(
    module: nnx.Module,
    *,
    layers: str = "blocks",
    loss: Callable[..., Any],
    call: Callable[..., Any] | None = None,
    batch: PyTree = None,
) -> tuple[Model, Any]:
    """Makes a model for `jaxpipe.pipeline` of a module, which stays as it is.

    Args:
        module: The module. Its call runs the layers one after the other, as `layer(x, ...)`.
        layers: The attribute with the list of layers, such as "blocks" or "decoder.blocks"; or with
            a stack of layers, one module whose parameters are [L, ...], as `nnx.vmap` makes it,
            which the call runs by `nnx.scan`.
        loss: `(output of the module, batch) -> loss`: a scalar, the mean over rows, or
            `jp.Weighted(total, weight)`; with metrics as `(loss, {name: scalar})`.
        call: `(module, batch) -> output`. Default: `module(batch)`.
        batch: An example of a batch, arrays or shapes. With it everything is checked at once, and
            parameters outside of layers belong to the embedding or to the loss, as the call uses
            them. Without it both have all of them, which costs an engine of several programs
            memory and a transfer.

    Returns:
        (the model, the module's parameters: `nnx.state(module, nnx.Param)`). If the module has
        random streams that are read, such as dropout, the pipeline takes a key. A layer may return
        `(x, aux)`, if the loss depends on aux, arrays or scalars in any structure, by adding them
        up times constants.

    Raises:
        ValueError: If layers have state or share parameters, differ in more than parameters, or
            something runs between them.
    """
    call = call or (lambda module, batch: module(batch))
    *owner_path, name = [int(part) if part.isdigit() else part for part in layers.split(".")]
    layer_list = getattr(submodule(module, owner_path, layers), str(name), None)
    is_stack = isinstance(layer_list, nnx.Module) and not isinstance(layer_list, nnx.List)
    cut = (cut_stack if is_stack else _cut)(module, layers, call)
    return cut_model(cut, loss, batch, stacked=is_stack), nnx.state(module, nnx.Param)


def _cut(module: nnx.Module, layers: str, call: Callable) -> CutModule:
    *owner_path, name = [int(part) if part.isdigit() else part for part in layers.split(".")]
    graph, state = nnx.split(module)
    template = nnx.merge(graph, jax.tree.map(shape_of, state))
    owner = submodule(template, owner_path, layers)
    layer_list = getattr(owner, str(name), None)
    if not isinstance(layer_list, list | tuple | nnx.List) or not len(layer_list):
        lists = [key for key, value in vars(owner).items() if isinstance(value, nnx.List)]
        raise ValueError(
            f"`layers` is {layers!r}, which is {type(layer_list).__name__} in the module. Give the "
            f"attribute with the list of layers; the module has the lists {lists}."
        )
    split_layers = [nnx.split(layer) for layer in layer_list]
    names = [f"{layers}[{i}]" for i in range(len(layer_list))]
    params = nnx.state(template, nnx.Param)
    delattr(owner, str(name))
    outer_graph, outer_state = nnx.split(template)
    prefix = (*owner_path, name)
    _check_own_parameters(split_layers, names, params, prefix)
    kept = dict(nnx.to_flat_state(state))

    def constants_of(state: Any, prefix: Path) -> dict[Path, Any]:
        """Returns the variables that are only read, such as caches for decoding and tables."""
        return {
            path: kept[(*prefix, *path)]
            for path, variable in nnx.to_flat_state(state)
            if not isinstance(variable, nnx.Param | nnx.RngState)
        }

    constants = constants_of(outer_state, ())
    split_modules = [
        _Layer(layer, graph, state, constants_of(state, (*prefix, i)))
        for i, (layer, (graph, state)) in enumerate(zip(layer_list, split_layers, strict=True))
    ]

    def run(outer: Any, weights: dict[int, Any], batch: PyTree, key: Any, hook: Callable) -> Any:
        state = with_values(outer_state, outer, key, constants)
        before = values_by_name(state)
        merged = nnx.merge(outer_graph, state)
        hooks = [
            _NnxHook(i, hook, layer, weights.get(i), key) for i, layer in enumerate(split_modules)
        ]
        vars(submodule(merged, owner_path, layers))[name] = hooks
        output = call(merged, batch)
        check_unchanged(before, values_by_name(nnx.state(merged)))
        return output

    split, join = _groups(params, prefix, len(layer_list))
    of_outer, of_layers = split(params)
    has_streams = [
        any(isinstance(v, nnx.RngKey) for _, v in nnx.to_flat_state(s))
        for s in (outer_state, *(state for _, state in split_layers))
    ]
    return CutModule(run, split, join, of_outer, of_layers, names, any(has_streams))


class _Layer(NamedTuple):
    """A layer in its parts: what `nnx.split` returned of it, and variables that are only read."""

    module: Any
    graph: Any
    state: Any
    constants: dict[Path, Any]


class _NnxHook:
    """Stands for a layer in the list of layers."""

    def __init__(self, index: int, hook: Callable, layer: _Layer, weights: Any, key: Any):
        self._index, self._hook, self._layer = index, hook, layer
        self._weights, self._key = weights, key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self._layer
        call = LayerCall(
            self._index,
            args,
            kwargs,
            self._run,
            [layer.graph, *(variable.get_value() for variable in layer.constants.values())],
            attributes=lambda: _attributes(layer.module),
        )
        return self._hook(call)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        state = with_values(self._layer.state, self._weights, self._key, self._layer.constants)
        # Read before the call: the variables of the layer are those of the state.
        before = values_by_name(state)
        layer = nnx.merge(self._layer.graph, state)
        y = layer(*args, **kwargs)
        check_unchanged(before, values_by_name(nnx.state(layer)))
        return y

    def __getattr__(self, name: str) -> Any:
        return read_setting(self._layer.module, name)


def _attributes(layer: Any) -> dict[str, Any]:
    """Returns the class of a layer, and its settings by their paths."""
    settings = {"class": type(layer).__name__}
    for path, node in nnx.iter_graph(layer):
        if isinstance(node, nnx.Module):
            prefix = "".join(f"{part}." for part in path)
            own = {n: v for n, v in vars(node).items() if not n.startswith("_") and is_setting(v)}
            settings |= {f"{prefix}{name}": value for name, value in own.items()}
    return settings


def _groups(params: Any, prefix: Path, num_layers: int) -> tuple[Callable, Callable]:
    """Returns a function that divides parameters into layers and others, and its inverse."""
    template: Any = nnx.to_flat_state(params)
    size = len(prefix)

    def split(params: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        flat = flat_params(params, {path for path, _ in template})
        outer, layers = {}, [{} for _ in range(num_layers)]
        for path, variable in flat.items():
            if path[:size] == prefix:
                layers[path[size]][name_of(path[size + 1 :])] = variable.get_value()
            else:
                outer[name_of(path)] = variable.get_value()
        return outer, layers

    def join(outer: dict[str, Any], layers: list[dict[str, Any]]) -> Any:
        def value(path: Path) -> Any:
            if path[:size] == prefix:
                return layers[path[size]][name_of(path[size + 1 :])]
            return outer[name_of(path)]

        return nnx.from_flat_state([(path, v.replace(value(path))) for path, v in template])

    return split, join


def _check_own_parameters(layers: list[Any], names: list[str], params: Any, prefix: Path) -> None:
    """Raises a `ValueError` if layers share parameters."""
    size, owned = len(prefix), {path for path, _ in nnx.to_flat_state(params)}
    shared = [
        f"{names[i]}.{name_of(path)}"
        for i, (_, layer) in enumerate(layers)
        for path, variable in nnx.to_flat_state(layer)
        if isinstance(variable, nnx.Param) and (*prefix, i, *path) not in owned
    ]
    own = {path[size] for path in owned if path[:size] == prefix}
    have_parameters = [nnx.state(layer, nnx.Param) for _, layer in layers]
    if shared or len(own) != sum(bool(nnx.to_flat_state(params)) for params in have_parameters):
        raise ValueError(
            f"Layers share the parameters {', '.join(shared[:8])} with another layer or another "
            "part of the module. Layers of one pipeline have parameters of their own; what they "
            "share is passed to them as an argument."
        )
