"""The front door's model of an NNX module: its call, cut at a list of layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from ..api import Model
from ..api.cut import CutModule, LayerCall, cut_model
from ._layer import check_unchanged, weights_of

Path = tuple[Any, ...]


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
        layers: The attribute with the list of layers, such as "blocks" or "decoder.blocks".
        loss: `(output of the module, batch) -> loss`: a scalar, the mean over rows, or `(total,
            weight)`; with metrics as `(loss, {name: scalar})`.
        call: `(module, batch) -> output`. Default: `module(batch)`.
        batch: An example of a batch, arrays or shapes. With it everything is checked at once, and
            parameters outside of layers belong to the embedding or to the loss, as the call uses
            them. Without it both have all of them, which costs an engine of several programs
            memory and a transfer.

    Returns:
        (the model, the module's parameters: `nnx.state(module, nnx.Param)`). If the module has
        random streams that are read, such as dropout, the pipeline takes a key.

    Raises:
        ValueError: If layers have state or share parameters, differ in more than parameters, or
            something runs between them.
    """
    cut = _cut(module, layers, call or (lambda module, batch: module(batch)))
    return cut_model(cut, loss, batch), nnx.state(module, nnx.Param)


def _cut(module: nnx.Module, layers: str, call: Callable) -> CutModule:
    *owner_path, name = [int(part) if part.isdigit() else part for part in layers.split(".")]
    graph, state = nnx.split(module)
    template = nnx.merge(graph, jax.tree.map(_shape_of, state))
    owner = _submodule(template, owner_path, layers)
    found = getattr(owner, str(name), None)
    if not isinstance(found, list | tuple | nnx.List) or not len(found):
        lists = [key for key, value in vars(owner).items() if isinstance(value, nnx.List)]
        raise ValueError(
            f"`layers` is {layers!r}, which is {type(found).__name__} in the module. Give the "
            f"attribute with the list of layers; the module has the lists {lists}."
        )
    split_layers = [nnx.split(layer) for layer in found]
    names = [f"{layers}[{i}]" for i in range(len(found))]
    params = nnx.state(template, nnx.Param)
    delattr(owner, str(name))
    outer_graph, outer_state = nnx.split(template)
    prefix = (*owner_path, name)
    _check_variables(dict(nnx.to_flat_state(outer_state)), split_layers, names, params, prefix)
    kept = dict(nnx.to_flat_state(state))
    constants = {
        path: kept[path]
        for path, variable in nnx.to_flat_state(outer_state)
        if not isinstance(variable, nnx.Param | nnx.RngState)
    }

    def run(outer: Any, given: dict[int, Any], batch: PyTree, key: Any, hook: Callable) -> Any:
        state = _with_values(outer_state, outer, key, constants)
        merged = nnx.merge(outer_graph, state)
        hooks = [
            _NnxHook(i, hook, g, s, given.get(i), key) for i, (g, s) in enumerate(split_layers)
        ]
        vars(_submodule(merged, owner_path, layers))[name] = hooks
        output = call(merged, batch)
        after = weights_of(nnx.state(merged, nnx.Not(nnx.RngState)))
        check_unchanged(weights_of(nnx.filter_state(state, nnx.Not(nnx.RngState))), after)
        return output

    split, join = _groups(params, prefix, len(found))
    of_outer, of_layers = split(params)
    has_streams = [
        any(isinstance(v, nnx.RngKey) for _, v in nnx.to_flat_state(s))
        for s in (outer_state, *(state for _, state in split_layers))
    ]
    return CutModule(run, split, join, of_outer, of_layers, names, any(has_streams))


class _NnxHook:
    """Stands for a layer in the list of layers."""

    def __init__(self, index: int, hook: Callable, graph: Any, state: Any, weights: Any, key: Any):
        self._index, self._hook, self._key = index, hook, key
        self._graph, self._state, self._weights = graph, state, weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._hook(LayerCall(self._index, args, kwargs, self._run, self._graph))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        state = _with_values(self._state, self._weights, self._key, {})
        layer = nnx.merge(self._graph, state)
        y = layer(*args, **kwargs)
        after = weights_of(nnx.state(layer, nnx.Not(nnx.RngState)))
        check_unchanged(weights_of(nnx.filter_state(state, nnx.Not(nnx.RngState))), after)
        return y

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"The call of the module reads `{name}` of a layer, which is not there in a pipeline. "
            "Only `layer(x, ...)` is."
        )


def _submodule(module: Any, path: list[Any], layers: str) -> Any:
    for part in path:
        try:
            module = module[part] if isinstance(part, int) else getattr(module, part)
        except (AttributeError, IndexError, KeyError) as error:
            raise ValueError(f"`layers` is {layers!r}, and the module has no {part!r}.") from error
    return module


def _with_values(state: Any, values: Any, key: Any, constants: dict[Path, Any]) -> Any:
    """Returns a state with parameters by name, streams that start from a key, and constants."""
    flat = []
    for i, (path, variable) in enumerate(nnx.to_flat_state(state)):
        if isinstance(variable, nnx.RngKey):
            start = jax.random.key(0) if key is None else key
            if not jnp.issubdtype(start.dtype, jax.dtypes.prng_key):
                start = jax.random.wrap_key_data(start)
            value = jax.random.fold_in(start, i)
        elif isinstance(variable, nnx.RngState):
            value = jnp.zeros(variable.get_value().shape, variable.get_value().dtype)
        else:
            value = constants[path].get_value() if path in constants else values[_name(path)]
        flat.append((path, variable.replace(value)))
    return nnx.from_flat_state(flat)


def _groups(params: Any, prefix: Path, num_layers: int) -> tuple[Callable, Callable]:
    """Returns how a state of parameters is taken apart into layers and others, and its inverse."""
    template: Any = nnx.to_flat_state(params)
    size = len(prefix)

    def split(params: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        flat: dict[Any, Any] = dict(nnx.to_flat_state(params))
        if flat.keys() != {path for path, _ in template}:
            raise ValueError(
                "`params` is not the tree of parameters that `jaxpipe.nnx.model` returned."
            )
        outer, layers = {}, [{} for _ in range(num_layers)]
        for path, variable in flat.items():
            if path[:size] == prefix:
                layers[path[size]][_name(path[size + 1 :])] = variable.get_value()
            else:
                outer[_name(path)] = variable.get_value()
        return outer, layers

    def join(outer: dict[str, Any], layers: list[dict[str, Any]]) -> Any:
        def value(path: Path) -> Any:
            if path[:size] == prefix:
                return layers[path[size]][_name(path[size + 1 :])]
            return outer[_name(path)]

        return nnx.from_flat_state([(path, v.replace(value(path))) for path, v in template])

    return split, join


def _check_variables(
    outer: dict[Path, Any], layers: list[Any], names: list[str], params: Any, prefix: Path
) -> None:
    """Raises a `ValueError` if layers have state, or share parameters."""
    state = nnx.BatchStat | nnx.Cache | nnx.Intermediate
    stateful = [_name(path) for path, v in outer.items() if isinstance(v, state)]
    size, owned = len(prefix), {path for path, _ in nnx.to_flat_state(params)}
    shared = []
    for i, (_, layer) in enumerate(layers):
        for path, v in nnx.to_flat_state(layer):
            if not isinstance(v, nnx.Param | nnx.RngState):
                stateful.append(f"{names[i]}.{_name(path)} ({type(v).__name__})")
            if isinstance(v, nnx.Param) and (*prefix, i, *path) not in owned:
                shared.append(f"{names[i]}.{_name(path)}")
    if stateful:
        raise ValueError(
            f"The module has the variables {', '.join(stateful[:8])}, which are no parameters. A "
            "pipeline has several microbatches in different layers at the same time, so layers "
            "have no state: normalize without batch statistics, and run without caches."
        )
    own = {path[size] for path in owned if path[:size] == prefix}
    if shared or len(own) != len(layers):
        raise ValueError(
            f"Layers share the parameters {', '.join(shared[:8])} with another layer or another "
            "part of the module. Layers of one pipeline have parameters of their own; what they "
            "share is passed to them as an argument."
        )


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
