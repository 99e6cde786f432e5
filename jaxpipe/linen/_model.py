"""The front door's model of a Linen module: its call, cut at layers that have numbered names."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import FrozenDict, freeze
from flax.errors import FlaxError
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

from ..api import Model
from ..api.cut import CutModule, LayerCall, cut_model

Path = tuple[str, ...]


def model(
    module: nn.Module,
    variables: PyTree,
    *,
    layers: str | Callable[[Path], int | None] = "block",
    loss: Callable[..., Any],
    call: Callable[..., Any] | None = None,
    batch: PyTree = None,
    rngs: Sequence[str] = (),
) -> tuple[Model, Any]:
    """Makes a model for `jaxpipe.pipeline` of a module, which stays as it is.

    Args:
        module: The module. Its call runs the layers one after the other, as `layer(x, ...)`.
        variables: What `module.init` returned, or the parameters in it; arrays or shapes.
        layers: The names of layers without their numbers, such as "block" for "block_0", "block_1",
            ...; with the path before it if there are several: "decoder/block". Or a function from
            the path of a submodule to the index of the layer, or None.
        loss: `(output of the module, batch) -> loss`: a scalar, the mean over rows, or `(total,
            weight)`; with metrics as `(loss, {name: scalar})`.
        call: `(module, batch) -> output`. Default: `module(batch)`.
        batch: An example of a batch, arrays or shapes. With it everything is checked at once, and
            parameters outside of layers belong to the embedding or to the loss, as the call uses
            them. Without it both have all of them, which costs an engine of several programs
            memory and a transfer.
        rngs: The names of random streams that the call reads, such as ("dropout",). The pipeline
            then takes a key.

    Returns:
        (the model, `variables`). Values that layers sow are dropped, as by `module.apply` without
        `mutable`.

    Raises:
        ValueError: If layers have state, differ in more than parameters, or something runs between
            them.
    """
    is_variables = isinstance(variables, Mapping) and isinstance(variables.get("params"), Mapping)
    others = sorted(set(variables) - {"params"}) if is_variables else []
    if others:
        names = ["/".join((name, *path)) for name in others for path in _flat(variables[name])]
        raise ValueError(
            f"`variables` has the collections {', '.join(others)} with {', '.join(names[:8])}. A "
            "pipeline has several microbatches in different layers at the same time, so layers "
            "have no state: normalize without batch statistics, and run without caches. Give "
            "`variables['params']` alone if the call does not read the others."
        )
    cut = _cut(module, variables, is_variables, layers, call, tuple(rngs))
    return cut_model(cut, loss, batch), variables


def _cut(
    module: nn.Module,
    variables: Any,
    is_variables: bool,
    layers: Any,
    call: Callable | None,
    rngs: tuple[str, ...],
) -> CutModule:
    flat = _flat(variables["params"] if is_variables else variables)
    paths = _layer_paths(flat, layers)
    ids, size = {path: i for i, path in enumerate(paths)}, len(paths[0])

    def split(given: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        new = _flat(given["params"] if is_variables else given)
        if new.keys() != flat.keys():
            raise ValueError(
                "`params` is not the tree of parameters that `jaxpipe.linen.model` was given."
            )
        outer, found = {}, [{} for _ in paths]
        for path, leaf in new.items():
            if path[:size] in ids:
                found[ids[path[:size]]]["/".join(path[size:])] = leaf
            else:
                outer["/".join(path)] = leaf
        return outer, found

    def params_of(outer: Mapping[str, Any], found: Mapping[int, Any]) -> dict[str, Any]:
        new = {tuple(name.split("/")): leaf for name, leaf in outer.items()}
        for i, layer in found.items():
            new |= {(*paths[i], *name.split("/")): leaf for name, leaf in layer.items()}
        return unflatten_dict(new)

    def join(outer: dict[str, Any], found: list[dict[str, Any]]) -> Any:
        params = params_of(outer, dict(enumerate(found)))
        whole = {"params": params} if is_variables else params
        return freeze(whole) if isinstance(variables, FrozenDict) else whole

    def run(outer: Any, found: dict[int, Any], batch: PyTree, key: Any, hook: Callable) -> Any:
        keys = {name: jax.random.fold_in(key, i) for i, name in enumerate(rngs)} if rngs else None
        try:
            with nn.intercept_methods(_interceptor(ids, hook)):
                return module.apply(
                    {"params": params_of(outer, found)}, batch, rngs=keys, method=call
                )
        except FlaxError as error:
            raise ValueError(
                f"The module cannot run in a pipeline: {error} Layers have no state other than "
                "parameters, and `rngs=('dropout',)` names random streams that are read."
            ) from error

    outer, found = jax.tree.map(_shape_of, split(variables))
    names = ["/".join(path) for path in paths]
    return CutModule(run, split, join, outer, found, names, bool(rngs))


def _interceptor(ids: dict[Path, int], hook: Callable) -> Callable:
    running: list[int] = []

    def intercept(run: Callable, args: tuple, kwargs: dict[str, Any], context: Any) -> Any:
        index = None if context.method_name != "__call__" else ids.get(context.module.path)
        if index is None or running:
            return run(*args, **kwargs)

        def run_layer(*args: Any, **kwargs: Any) -> Any:
            running.append(index)
            try:
                return run(*args, **kwargs)
            finally:
                running.pop()

        return hook(LayerCall(index, args, kwargs, run_layer, _settings(context.module)))

    return intercept


def _settings(module: nn.Module) -> list[Any]:
    """Returns the attributes of a layer, other than its name."""
    names = [field.name for field in dataclasses.fields(module)]
    return [type(module), *(getattr(module, n) for n in names if n not in ("parent", "name"))]


def _flat(tree: Any) -> dict[Path, Any]:
    return flatten_dict(tree.unfreeze() if isinstance(tree, FrozenDict) else dict(tree))


def _layer_paths(flat: dict[Path, Any], layers: Any) -> list[Path]:
    """Returns the paths of all layers, in order."""
    modules = sorted({path[:i] for path in flat for i in range(1, len(path))})
    index_of = layers if callable(layers) else _by_name(str(layers))
    found = [(index, path) for path in modules if (index := index_of(path)) is not None]
    paths = [path for _, path in sorted(found)]
    alike = len({(path[:-1] if isinstance(layers, str) else len(path)) for path in paths}) == 1
    if not alike or [index for index, _ in sorted(found)] != list(range(len(paths))):
        known = sorted({re.sub(r"\d+$", "N", "/".join(path)) for path in modules})
        raise ValueError(
            f"`layers` is {layers!r}, which names {['/'.join(path) for path in paths][:8]}. It "
            "must name submodules that are numbered from 0. The module has the submodules "
            f"{', '.join(known[:16])}."
        )
    return paths


def _by_name(layers: str) -> Callable[[Path], int | None]:
    *parents, stem = layers.replace(".", "/").split("/")
    pattern = re.compile(re.escape(stem.removesuffix("_")) + r"_?(\d+)")

    def index_of(path: Path) -> int | None:
        match = pattern.fullmatch(path[-1])
        if match is None or (parents and list(path[:-1]) != parents):
            return None
        return int(match[1])

    return index_of


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
