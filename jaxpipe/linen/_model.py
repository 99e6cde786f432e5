"""The front door's model of a Linen module: its call, cut at layers that have numbered names."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
from flax.core import DenyList, FrozenDict, freeze
from flax.errors import FlaxError
from flax.linen import fp8_ops
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

from ..api import Model
from ..api.cut import (
    CutModule,
    LayerCall,
    cut_model,
    cut_stack_or_calls,
    layer_of,
    named_value,
    num_stacked,
    shape_of,
    sown_losses,
    with_sown_losses,
)

Path = tuple[str, ...]


def model(
    module: nn.Module,
    variables: PyTree,
    *,
    layers: str | Callable[[Path], int | None] | Sequence[str] = "block",
    loss: Callable[..., Any],
    call: Callable[..., Any] | None = None,
    batch: PyTree = None,
    rngs: Sequence[str] = (),
    sown: Mapping[str, float | None] | None = None,
    output: Callable[..., Any] | None = None,
) -> tuple[Model, Any]:
    """Makes a model for `jaxpipe.pipeline` of a module, which stays as it is.

    Args:
        module: The module. Its call runs the layers in order, as `layer(x, ...)`.
        variables: The variables that `module.init` returned, or the parameters among them; arrays
            or shapes. Collections other than `params`, such as caches for decoding, running
            statistics and tables, are constants, which the call may read as
            `module.apply(variables, batch)` does: arrays.
        layers: The names of layers without their numbers, such as "block" for "block_0", "block_1",
            ...; with the path before it if there are several: "decoder/block". Or a function from
            the path of a submodule to the index of the layer, or None. Or the name of a submodule
            that runs all layers by `nn.scan`, whose parameters are [L, ...]; or of one that is
            called several times, a layer in each call. Several names, such as ("block",
            "shared_block"), if layers are calls of the submodules of all of them.
        loss: `(output of the module, batch) -> loss`: a scalar, the mean over rows, or
            `jp.Weighted(total, weight)`; with metrics as `(loss, {name: metric})`, scalars or
            arrays [rows, ...].
        call: `(module, batch) -> output`. Default: `module(batch)`.
        batch: An example of a batch, arrays or shapes. With it everything is checked at once,
            layers may differ and read what any layer before them has returned, and parameters
            outside of layers belong to the embedding or to the loss, as the call uses them. Without
            it both have all of them, which costs an engine of several programs memory and a
            transfer.
        rngs: The names of random streams that the call reads, such as ("dropout",). The pipeline
            then takes a key.
        sown: Collections of scalars that layers sow, with the factor by which the sum of all is
            added to the loss, such as `{"losses": 0.01}`; the sum is also a metric of that name.
            None for values that are to be dropped, as `module.apply` without `mutable` drops them.
        output: `(output of the module, batch) -> arrays [rows, ...]`, which `pipe.apply` returns.
            Default: all that the module returns.

    Returns:
        (the model, `variables` with the parameters alone). A layer may return `(x, aux)`, if the
        loss depends on aux, arrays or scalars in any structure, by adding them up times constants.

    Raises:
        ValueError: If the call writes a variable, or layers sow values that `sown` does not name;
            or without `batch` if layers differ in more than parameters, or something runs between
            them.
    """
    is_variables = isinstance(variables, Mapping) and isinstance(variables.get("params"), Mapping)
    factors, constants = dict(sown or {}), {}
    if is_variables:  # `init` has returned what layers sowed too
        constants = _constants(variables, {"params", *factors})
        is_frozen, variables = isinstance(variables, FrozenDict), {"params": variables["params"]}
        variables = freeze(variables) if is_frozen else variables
    flat = _flat(variables["params"] if is_variables else variables)
    apply = _application(module, call, tuple(rngs), factors, constants)
    several = layers if isinstance(layers, Sequence) and not isinstance(layers, str) else None
    stack = _stack_path(flat, layers) if several is None else None
    cut_of = partial(_cut, flat, apply, factors, constants, bool(rngs), variables, is_variables)

    def plain(params: Any, batch: PyTree) -> Any:
        returned = apply(params["params"] if is_variables else params, batch, None)
        return with_sown_losses(loss, factors)(returned, batch)

    def of_calls() -> Model:
        cut = cut_of(_paths_by_calls(flat, [layers] if several is None else several))
        cut = replace(cut, by_calls=True)
        return cut_model(cut, loss, batch, output, plain)

    def of_stack() -> Model:
        assert stack is not None
        cut = _cut_at_scan(flat, apply, stack, bool(rngs), variables, is_variables)

        def without_sown(returned: tuple[Any, Any], batch: PyTree) -> Any:
            return output(returned[0], batch) if output else returned[0]

        with_sown = with_sown_losses(loss, factors)
        return cut_model(cut, with_sown, batch, without_sown, plain, stacked=True)

    if several is not None:
        return of_calls(), variables
    if stack:
        return cut_stack_or_calls(of_stack, of_calls, batch), variables
    cut = cut_of(_layer_paths(flat, layers))
    return cut_model(cut, loss, batch, output, plain), variables


def _cut(
    flat: dict[Path, Any],
    apply: Callable,
    factors: dict[str, float | None],
    constants: dict[str, Any],
    has_streams: bool,
    variables: Any,
    is_variables: bool,
    paths: list[Path],
) -> CutModule:
    """Returns the cut of a module whose layers are the submodules at these paths."""
    split, join, params_of = _groups(flat, paths, variables, is_variables)
    ids = {path: i for i, path in enumerate(paths)}

    def run(
        outer: Any, layer_params: dict[int, Any], batch: PyTree, key: Any, hook: Callable
    ) -> Any:
        with nn.intercept_methods(_interceptor(ids, factors, set(constants), hook, has_streams)):
            output, sown = apply(params_of(outer, layer_params), batch, key)
        names = ["/".join((name, *path)) for name in sown for path in _flat(sown[name])]
        if names:
            raise ValueError(
                f"The module sows {', '.join(names[:8])} outside of its layers. Return what the "
                "embedding and the head add to the loss."
            )
        return output

    outer, layer_params = jax.tree.map(shape_of, split(variables))
    return CutModule(
        run=run,
        split=split,
        join=join,
        outer=outer,
        layers=layer_params,
        names=["/".join(path) for path in paths],
        takes_key=has_streams,
    )


def _paths_by_calls(flat: dict[Path, Any], layers: Sequence[Any]) -> list[Path]:
    """Returns the paths of numbered layers, and of other submodules that `layers` names."""
    paths: list[Path] = []
    for name in layers:
        path = _stack_path(flat, name)
        paths += [path] if path else _layer_paths(flat, name)
    return paths


def _groups(
    flat: dict[Path, Any], paths: list[Path], variables: Any, is_variables: bool
) -> tuple[Callable, Callable, Callable]:
    """Returns a function that divides variables into layers and others, and two inverses."""
    owner_by_path: dict[Path, tuple[int | None, str]] = {}
    for path in flat:
        at = layer_of(path, paths)
        owner_by_path[path] = at, "/".join(path if at is None else path[len(paths[at]) :])

    def split(params: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        new = _flat(params["params"] if is_variables else params)
        if new.keys() != flat.keys():
            raise ValueError(
                "`params` is not the tree of parameters that `jaxpipe.linen.model` was given."
            )
        outer, layer_params = {}, [{} for _ in paths]
        for path, leaf in new.items():
            at, name = owner_by_path[path]
            (outer if at is None else layer_params[at])[name] = leaf
        return outer, layer_params

    def params_of(outer: Mapping[str, Any], layer_params: Mapping[int, Any]) -> dict[str, Any]:
        new = {tuple(name.split("/")): leaf for name, leaf in outer.items()}
        for i, layer in layer_params.items():
            new |= {(*paths[i], *name.split("/")): leaf for name, leaf in layer.items()}
        return unflatten_dict(new)

    def join(outer: dict[str, Any], layer_params: list[dict[str, Any]]) -> Any:
        params = params_of(outer, dict(enumerate(layer_params)))
        whole = {"params": params} if is_variables else params
        return freeze(whole) if isinstance(variables, FrozenDict) else whole

    return split, join, params_of


def _constants(variables: Mapping[str, Any], others: set[str]) -> dict[str, Any]:
    """Returns the collections that a call only reads, such as caches for decoding and tables."""
    constants = {name: variables[name] for name in sorted(set(variables) - others)}
    shapes = [
        "/".join((name, *path))
        for name in constants
        for path, leaf in _flat(constants[name]).items()
        if isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    if shapes:
        raise ValueError(
            f"`variables` has the shapes of {', '.join(shapes[:8])}, which are no parameters, so "
            "a pipeline takes their values as constants. Give arrays; or `variables['params']` "
            "alone if the call does not read them."
        )
    if fp8_ops.OVERWRITE_WITH_GRADIENT in constants:
        raise ValueError(
            f"`variables` has the collection {fp8_ops.OVERWRITE_WITH_GRADIENT}, scales of FP8 that "
            "a training step overwrites, and not constants: `jaxpipe.linen.create_pipeline` has "
            "them."
        )
    return constants


def _application(
    module: nn.Module,
    call: Callable | None,
    rngs: tuple[str, ...],
    sown: dict[str, float | None],
    constants: dict[str, Any],
) -> Callable:
    """Returns `(params, batch, key) -> (output, sown values by collection)` of a module."""
    # Values that are made are mutable, to be refused by name. So are no constants: Flax names those
    # that are written, and `nn.scan` returns new arrays for unchanged ones that are mutable.
    mutable = DenyList(("params", *constants))

    def apply(params: dict[str, Any], batch: PyTree, key: Any) -> tuple[Any, dict[str, Any]]:
        keys = {name: jax.random.fold_in(key, i) for i, name in enumerate(rngs)} if rngs else None
        variables = {"params": params, **constants}
        try:
            with nn.intercept_methods(_sow_guard(set(constants))):
                output, changed = module.apply(
                    variables, batch, rngs=keys, method=call, mutable=mutable
                )
        except FlaxError as error:
            raise ValueError(
                f"The module cannot run in a pipeline: {error} Variables other than parameters "
                "are constants there: several microbatches are in different layers at a time. "
                "`rngs=('dropout',)` names random streams that are read."
            ) from error
        _check_sown(changed, sown)
        return output, {name: changed.get(name, {}) for name, f in sown.items() if f is not None}

    return apply


def _sow_guard(constants: set[str]) -> Callable:
    """Returns an interceptor that raises a `ValueError` where a module sows into constants."""

    def intercept(run: Callable, args: tuple, kwargs: dict[str, Any], context: Any) -> Any:
        module = context.module

        def sow(collection: str, name: str, *values: Any, **more: Any) -> bool:
            if collection in constants:
                _check_sown({collection: unflatten_dict({(*module.path, name): None})}, {})
            return type(module).sow(module, collection, name, *values, **more)

        # `sow` into an immutable collection does nothing, and Flax intercepts no methods of its
        # own. A module is a copy of this call, and its attributes end with it.
        object.__setattr__(module, "sow", sow)
        return run(*args, **kwargs)

    return intercept


def _check_sown(changed: Mapping[str, Any], sown: Mapping[str, Any]) -> None:
    """Raises a `ValueError` if a call has made values in collections that `sown` does not name."""
    names = ["/".join((c, *path)) for c in changed if c not in sown for path in _flat(changed[c])]
    if names:
        raise ValueError(
            f"Layers, or the call, make the values {', '.join(names[:8])} besides parameters. If "
            "layers sow scalars for the loss, give `sown={'losses': 0.01}`, the collection and its "
            "factor; with None for the factor they are dropped. State, such as batch statistics, "
            "is not possible: a pipeline has several microbatches in different layers at a time."
        )


def _cut_at_scan(
    flat: dict[Path, Any],
    apply: Callable,
    path: Path,
    has_streams: bool,
    variables: Any,
    is_variables: bool,
) -> CutModule:
    """Returns the cut of a module that scans over the layers in a submodule."""
    split, join, params_of = _groups(flat, [path], variables, is_variables)

    def split_stack(params: Any) -> tuple[dict[str, Any], Any]:
        outer, (stack,) = split(params)
        return outer, stack

    def run(outer: Any, stack: Any, batch: PyTree, key: Any) -> tuple[Any, dict[str, Any]]:
        return apply(params_of(outer, {0: stack}), batch, key)

    outer, stack = jax.tree.map(shape_of, split_stack(variables))
    name = "/".join(path)
    count = num_stacked(
        stack,
        f"{name!r}, which has the parameters",
        "The submodule of an `nn.scan` over layers has all of them as [layers, ...]: "
        "`variable_axes={'params': 0}`.",
    )
    return CutModule(
        run=run,
        split=split_stack,
        join=lambda outer, stack: join(outer, [stack]),
        outer=outer,
        layers=stack,
        names=[f"{name}[{i}]" for i in range(count)],
        takes_key=has_streams,
    )


def _interceptor(
    ids: dict[Path, int],
    factors: Mapping[str, float | None],
    constants: set[str],
    hook: Callable,
    has_streams: bool,
) -> Callable:
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

        def sown() -> dict[str, Any]:
            inputs, all_collections = {"params", *constants}, context.module.variables
            collections = {n: all_collections[n] for n in all_collections if n not in inputs}
            _check_sown(collections, factors)
            return sown_losses(collections, factors)

        settings = _settings(context.module)
        variables = context.module.variables
        of_layer = {name: variables[name] for name in sorted(constants & set(variables))}
        static = [*settings.values(), of_layer]
        # A layer may read its name. Flax folds it into random streams, which have layers' own keys.
        static += [] if has_streams else [context.module.name]
        named = {name: named_value(value) for name, value in settings.items() if name}
        return hook(
            LayerCall(
                index=index,
                args=args,
                kwargs=kwargs,
                run=run_layer,
                static=static,
                sown=sown,
                attributes=lambda: named,
            )
        )

    return intercept


def _settings(module: nn.Module) -> dict[str, Any]:
    """Returns the class of a layer, and its attributes other than its name."""
    names = [f.name for f in dataclasses.fields(module) if f.name not in ("parent", "name")]
    return {"class": type(module).__name__, "": type(module)} | {
        name: getattr(module, name) for name in names
    }


def _flat(tree: Any) -> dict[Path, Any]:
    return flatten_dict(tree.unfreeze() if isinstance(tree, FrozenDict) else dict(tree))


def _layer_paths(flat: dict[Path, Any], layers: Any) -> list[Path]:
    """Returns the paths of all layers, in order."""
    modules = sorted({path[:i] for path in flat for i in range(1, len(path))})
    index_of = layers if callable(layers) else _by_name(str(layers))
    indexed = [(index, path) for path in modules if (index := index_of(path)) is not None]
    paths = [path for _, path in sorted(indexed)]
    alike = len({(path[:-1] if isinstance(layers, str) else len(path)) for path in paths}) == 1
    if not alike or [index for index, _ in sorted(indexed)] != list(range(len(paths))):
        patterns = {re.sub(r"\d+$", "N", "/".join(path)) for path in modules}
        nearest = sorted(patterns, key=lambda name: (not name.endswith("N"), name.count("/"), name))
        raise ValueError(
            f"`layers` is {layers!r}, which names {['/'.join(path) for path in paths][:8]}. It "
            "must name submodules that are numbered from 0. The module has the submodules "
            f"{', '.join(nearest[:16])}."
        )
    return paths


def _stack_path(flat: dict[Path, Any], layers: Any) -> Path | None:
    """Returns the path of the one submodule that has the very name `layers`, if there is one."""
    if callable(layers):
        return None
    suffix = tuple(str(layers).replace(".", "/").split("/"))
    modules = {path[:i] for path in flat for i in range(1, len(path))}
    matches = [path for path in modules if path[-len(suffix) :] == suffix]
    return matches[0] if len(matches) == 1 else None


def _by_name(layers: str) -> Callable[[Path], int | None]:
    *parents, stem = layers.replace(".", "/").split("/")
    pattern = re.compile(re.escape(stem.removesuffix("_")) + r"_?(\d+)")

    def index_of(path: Path) -> int | None:
        match = pattern.fullmatch(path[-1])
        if match is None or (parents and list(path[:-1]) != parents):
            return None
        return int(match[1])

    return index_of
