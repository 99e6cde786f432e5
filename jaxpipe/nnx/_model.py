"""The front door's model of an NNX module: its call, cut at a list of layers or at a scan."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from ..api import Model
from ..api.cut import (
    CutModule,
    LayerCall,
    cut_model,
    cut_stack_or_calls,
    is_setting,
    layer_of,
    num_stacked,
    read_setting,
    refuse_state,
    shape_of,
)
from ..compat.maxtext.nnx import check_unchanged, name_of, overwritten_in, weights_of

Path = tuple[Any, ...]


def model(
    module: nnx.Module,
    *,
    layers: str | Sequence[str] = "blocks",
    loss: Callable[..., Any],
    call: Callable[..., Any] | None = None,
    batch: PyTree = None,
    output: Callable[..., Any] | None = None,
) -> tuple[Model, Any]:
    """Makes a model for `jaxpipe.pipeline` of a module, which stays as it is.

    Args:
        module: The module. Its call runs the layers in order, as `layer(x, ...)`.
        layers: The attribute with the list of layers, such as "blocks" or "decoder.blocks"; or with
            a stack of layers, one module whose parameters are [L, ...], as `nnx.vmap` makes it,
            which the call runs by `nnx.scan`; or with one module that is called several times, a
            layer in each call. Several attributes, such as ("blocks", "shared_block"), if layers
            are calls of the modules in all of them.
        loss: `(output of the module, batch) -> loss`: a scalar, the mean over rows, or
            `jp.Weighted(total, weight)`; with metrics as `(loss, {name: metric})`, scalars or
            arrays [rows, ...].
        call: `(module, batch) -> output`. Default: `module(batch)`.
        batch: An example of a batch, arrays or shapes. With it everything is checked at once,
            layers may differ and read what any layer before them has returned, and parameters
            outside of layers belong to the embedding or to the loss, as the call uses them. Without
            it both have all of them, which costs an engine of several programs memory and a
            transfer.
        output: `(output of the module, batch) -> arrays [rows, ...]`, which `pipe.apply` returns.
            Default: all that the module returns.

    Returns:
        (the model, the module's parameters: `nnx.state(module, nnx.Param)`). If the module has
        random streams that are read, such as dropout, the pipeline takes a key. A layer may return
        `(x, aux)`, if the loss depends on aux, arrays or scalars in any structure, by adding them
        up times constants.

    Raises:
        ValueError: If a call writes state, layers share parameters with the embedding or the loss,
            or without `batch` something runs between layers.
    """
    call, params = call or (lambda module, batch: module(batch)), nnx.state(module, nnx.Param)
    names = [layers] if isinstance(layers, str) else list(layers)

    by_calls = not isinstance(layers, str)
    graph, _, others = nnx.split(module, nnx.Param, ...)
    if overwritten := overwritten_in(others):
        raise ValueError(
            f"The module has the variables {', '.join(overwritten[:8])}, scales of FP8 that a "
            "training step overwrites, and not constants: `jaxpipe.nnx.create_pipeline` has them."
        )

    def plain(params: Any, batch: PyTree) -> Any:
        return loss(call(nnx.merge(graph, params, others), batch), batch)

    def of_calls() -> Model:
        return cut_model(_cut(module, names, call, by_calls), loss, batch, output, plain)

    def of_stack() -> Model:
        return cut_model(
            _cut_stack(module, names[0], call), loss, batch, output, plain, stacked=True
        )

    if not by_calls and _is_module(_attribute(module, names[0])[1]):
        return cut_stack_or_calls(of_stack, of_calls, batch), params
    return of_calls(), params


def _path(layers: str) -> Path:
    return tuple(int(part) if part.isdigit() else part for part in layers.split("."))


def _attribute(module: Any, layers: str) -> tuple[Path, Any]:
    """Returns the path of an attribute of the module, and its value."""
    path = _path(layers)
    owner = submodule(module, list(path[:-1]), layers)
    return path, getattr(owner, str(path[-1]), None)


def _is_module(value: Any) -> bool:
    """Returns whether a value is a module that is no list of modules."""
    return isinstance(value, nnx.Module) and not isinstance(value, nnx.List)


def _paths_of_layers(module: Any, layers: list[str]) -> dict[Path, Any]:
    """Returns the layers of lists, and other modules that `layers` names, by their paths."""
    layer_by_path: dict[Path, Any] = {}
    for name in layers:
        path, value = _attribute(module, name)
        if _is_module(value):
            layer_by_path[path] = value
        elif isinstance(value, list | tuple | nnx.List) and len(value):
            layer_by_path |= {(*path, i): layer for i, layer in enumerate(value)}
        else:
            owner = submodule(module, list(path[:-1]), name)
            lists = [key for key, v in vars(owner).items() if isinstance(v, nnx.List)]
            raise ValueError(
                f"`layers` is {name!r}, which is {type(value).__name__} in the module. Give the "
                "attribute with the list of layers; "
                f"`{name_of(path[:-1]) or 'the module'}` has the lists {lists}."
            )
    return layer_by_path


def _cut(module: nnx.Module, layers: list[str], call: Callable, by_calls: bool) -> CutModule:
    graph, state = nnx.split(module)
    for path, leaf in nnx.to_flat_state(state):
        if not isinstance(leaf, nnx.Variable):
            raise ValueError(
                f"`{name_of(path)}` of the module is an array and no `nnx.Variable`, so it is not "
                "known whether layers share it. Make it an `nnx.Variable`, or a constant of the "
                "function that reads it."
            )
    template = nnx.merge(graph, jax.tree.map(shape_of, state))
    modules = _paths_of_layers(template, layers)
    paths = list(modules)
    params, owners = nnx.state(template, nnx.Param), _variable_paths(template)
    split_layers = [nnx.split(layer) for layer in modules.values()]
    for name in layers:
        (*owner, last), _ = _attribute(template, name)
        delattr(submodule(template, owner, name), str(last))
    outer_graph, outer_state = nnx.split(template)
    outside = {path: owners[i] for i, path in _variable_paths(template).items()}
    shared = _names_of_shared(owners, modules, {*outside.values()})
    kept = dict(nnx.to_flat_state(state))
    constants = _constants(outer_state, kept, outside)
    split_modules = []
    for (module_graph, state), layer, names in zip(
        split_layers, modules.values(), shared, strict=True
    ):
        at = {path: owners[i] for i, path in _variable_paths(layer).items()}
        of_layer = _constants(state, kept, at)
        split_modules.append(_Layer(layer, module_graph, state, of_layer, names))

    def run(outer: Any, weights: dict[int, Any], batch: PyTree, key: Any, hook: Callable) -> Any:
        values = {
            name_of(path): outer[name_of(at)]
            for path, at in outside.items()
            if name_of(at) in outer
        }
        state = with_values(outer_state, values, key, constants)
        before = _values_by_name(state)
        merged = nnx.merge(outer_graph, state)
        hooks = {
            path: _NnxHook(i, hook, layer, layer.weights(outer, weights.get(i)), key)
            for i, (path, layer) in enumerate(zip(paths, split_modules, strict=True))
        }
        for name in layers:
            (*owner, last), _ = _attribute(merged, name)
            path = (*owner, last)
            list_hooks = [hook for of_layer, hook in hooks.items() if of_layer[:-1] == path]
            vars(submodule(merged, owner, name))[last] = hooks.get(path, list_hooks)
        output = call(merged, batch)
        check_unchanged(before, _values_by_name(nnx.state(merged)))
        return output

    names_of_shared = {outer for names in shared for outer in names.values()}
    split, join = _groups(params, paths, names_of_shared)
    of_outer, of_layers = split(params)
    has_streams = [
        any(isinstance(v, nnx.RngKey) for _, v in nnx.to_flat_state(s))
        for s in (outer_state, *(state for _, state in split_layers))
    ]
    names = [
        f"{name_of(path[:-1])}[{path[-1]}]" if isinstance(path[-1], int) else name_of(path)
        for path in paths
    ]
    return CutModule(
        run=run,
        split=split,
        join=join,
        outer=of_outer,
        layers=of_layers,
        names=names,
        takes_key=any(has_streams),
        shared=frozenset(names_of_shared),
        by_calls=by_calls or _is_module(_attribute(module, layers[0])[1]),
    )


def _constants(state: Any, kept: dict[Path, Any], owners: dict[Path, Path]) -> dict[Path, Any]:
    """Returns the variables that are only read, such as caches for decoding and tables."""
    return {
        path: kept[owners[path]]
        for path, variable in nnx.to_flat_state(state)
        if not isinstance(variable, nnx.Param | nnx.RngState)
    }


def _cut_stack(module: nnx.Module, layers: str, call: Callable) -> CutModule:
    """Returns the module and its stack of layers, for a cut at the scan over them."""
    prefix = _path(layers)
    graph, state = nnx.split(module)
    kept = dict(nnx.to_flat_state(state))
    state = jax.tree.map(shape_of, state)
    params = nnx.state(nnx.merge(graph, state), nnx.Param)
    _check_variables(dict(nnx.to_flat_state(state)), prefix)
    constants = _constants(state, kept, {path: path for path in kept})
    split_layers, join_layers = _groups(params, [prefix], set())

    def split(params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        outer, (stack,) = split_layers(params)
        return outer, stack

    outer, stack = split(params)

    def run(outer: Any, stack: Any, batch: PyTree, key: Any) -> Any:
        values = dict(outer) | {f"{layers}.{name}": leaf for name, leaf in stack.items()}
        filled = with_values(state, values, key, constants)
        # Read before the call: the variables of the module are those of the state.
        before = _values_by_name(filled)
        merged = nnx.merge(graph, filled)
        output = call(merged, batch)
        # The scan returns the variables of the stack.
        old = {name: x for name, x in before.items() if not name.startswith(f"{layers}.")}
        after = _values_by_name(nnx.state(merged)).items()
        check_unchanged(old, {name: x for name, x in after if name in old or name not in before})
        return output

    return CutModule(
        run=run,
        split=split,
        join=lambda outer, stack: join_layers(outer, [stack]),
        outer=outer,
        layers=stack,
        names=[f"{layers}[{i}]" for i in range(num_stacked(stack))],
        takes_key=any(isinstance(v, nnx.RngKey) for v in kept.values()),
    )


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


def _variable_paths(module: Any) -> dict[int, Path]:
    """Returns the first path of every variable, by the identity of the variable."""
    return {
        id(node): tuple(path)
        for path, node in nnx.iter_graph(module)
        if isinstance(node, nnx.Variable)
    }


def _names_of_shared(
    owners: dict[int, Path], modules: dict[Path, Any], outside: set[Path]
) -> list[dict[str, str]]:
    """Returns for every layer its parameters that are elsewhere too, with their outer names.

    `outside` are the paths of variables that modules other than layers have.
    """
    params_by_layer = [
        {id(v): tuple(path) for path, v in nnx.iter_graph(layer) if isinstance(v, nnx.Param)}
        for layer in modules.values()
    ]
    uses = Counter(i for of_layer in params_by_layer for i in of_layer)
    return [
        {
            name_of(local): name_of(owners[i])
            for i, local in of_layer.items()
            if uses[i] > 1 or owners[i] in outside
        }
        for of_layer in params_by_layer
    ]


class _Layer(NamedTuple):
    """A layer in its parts.

    Attributes:
        graph: With `state` what `nnx.split` returned of it.
        constants: Variables that are only read, by their paths in the layer.
        shared: Parameters that other layers have too: their names in the layer, and outer names.
    """

    module: Any
    graph: Any
    state: Any
    constants: dict[Path, Any]
    shared: dict[str, str]

    def weights(self, outer: Any, own: dict[str, Any] | None) -> dict[str, Any]:
        """Returns the values of parameters by their names in the layer."""
        return {name: outer[at] for name, at in self.shared.items()} | (own or {})


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
            [
                layer.graph,
                sorted(layer.shared.items()),
                *(variable.get_value() for variable in layer.constants.values()),
            ],
            attributes=lambda: _attributes(layer.module),
        )
        return self._hook(call)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        state = with_values(self._layer.state, self._weights, self._key, self._layer.constants)
        # Read before the call: the variables of the layer are those of the state.
        before = _values_by_name(state)
        layer = nnx.merge(self._layer.graph, state)
        y = layer(*args, **kwargs)
        check_unchanged(before, _values_by_name(nnx.state(layer)))
        return y

    def __getattr__(self, name: str) -> Any:
        return read_setting(self._layer.module, name)

    @property
    def __class__(self) -> Any:  # for `isinstance` in the call of the module
        return type(self._layer.module)


def _attributes(layer: Any) -> dict[str, Any]:
    """Returns the class of a layer, and its settings by their paths."""
    settings = {"class": type(layer).__name__}
    for path, node in nnx.iter_graph(layer):
        if isinstance(node, nnx.Module):
            prefix = "".join(f"{part}." for part in path)
            own = {n: v for n, v in vars(node).items() if not n.startswith("_") and is_setting(v)}
            settings |= {f"{prefix}{name}": value for name, value in own.items()}
    return settings


def _groups(params: Any, paths: list[Path], shared: set[str]) -> tuple[Callable, Callable]:
    """Returns a function that divides parameters into layers and others, and its inverse."""
    template: Any = nnx.to_flat_state(params)
    owner_by_path: dict[Path, tuple[int | None, str]] = {}
    for path, _ in template:
        at = layer_of(path, paths)
        if at is None or name_of(path) in shared:
            owner_by_path[path] = None, name_of(path)
        else:
            owner_by_path[path] = at, name_of(path[len(paths[at]) :])

    def split(params: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        outer, layers = {}, [{} for _ in paths]
        for path, variable in _flat_params(params, set(owner_by_path)).items():
            at, name = owner_by_path[path]
            (outer if at is None else layers[at])[name] = variable.get_value()
        return outer, layers

    def join(outer: dict[str, Any], layers: list[dict[str, Any]]) -> Any:
        def value(path: Path) -> Any:
            at, name = owner_by_path[path]
            return (outer if at is None else layers[at])[name]

        return nnx.from_flat_state([(path, v.replace(value(path))) for path, v in template])

    return split, join


def submodule(module: Any, path: list[Any], layers: str) -> Any:
    """Returns the submodule at a path; `layers` is what the user called it."""
    for part in path:
        try:
            module = module[part] if isinstance(part, int) else getattr(module, part)
        except (AttributeError, IndexError, KeyError) as error:
            raise ValueError(f"`layers` is {layers!r}, and the module has no {part!r}.") from error
    return module


def with_values(state: Any, values: Any, key: Any, constants: dict[Path, Any]) -> Any:
    """Returns a state with parameters by name, streams that start from a key, and constants."""
    flat = []
    for i, (path, variable) in enumerate(nnx.to_flat_state(state)):
        if isinstance(variable, nnx.RngKey):
            start = jax.random.key(0) if key is None else key
            if not jnp.issubdtype(start.dtype, jax.dtypes.prng_key):
                start = jax.random.wrap_key_data(start)
            value = jax.random.fold_in(start, i)
            if shape := variable.get_value().shape:  # one for each layer of a stack
                value = jax.random.split(value, shape)
        elif isinstance(variable, nnx.RngState):
            value = jnp.zeros(variable.get_value().shape, variable.get_value().dtype)
        else:
            value = constants[path].get_value() if path in constants else values[name_of(path)]
        flat.append((path, variable.replace(value)))
    return nnx.from_flat_state(flat)


def _values_by_name(state: Any) -> dict[str, Any]:
    """Returns the arrays of a state by name, without those of random streams."""
    return weights_of(nnx.filter_state(state, nnx.Not(nnx.RngState)))


def _flat_params(params: Any, paths: set[Path]) -> dict[Path, Any]:
    """Returns the variables of the user's parameters, which are at `paths`."""
    flat = dict(nnx.to_flat_state(params)) if isinstance(params, nnx.State) else {}
    if flat.keys() != paths:
        raise ValueError(
            f"`params` is {type(params).__name__}, and not the tree of parameters that "
            "`jaxpipe.nnx.model` returned."
        )
    return flat
