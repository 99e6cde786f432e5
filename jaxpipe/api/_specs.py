"""How parameters are sharded over axes other than the stages, by the user's specs.

The user gives a spec for a leaf of the user's own tree. Engines are given a spec for a parameter
of one layer, or of another group, by its path.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import PyTree

from ..engines import ParamSpecs
from ..sharding.specs import axes_of, axes_of_dim
from ._dependence import dependent_inputs

SpecRule = Callable[[str, Any], PartitionSpec | None] | PyTree
"""`(path, leaf) -> spec or None`, or a tree prefix of specs."""


def param_specs(
    rule: SpecRule | None,
    params: PyTree,
    to_groups: Callable[[PyTree], dict[str, PyTree]],
    mesh: Mesh,
    has_kinds: bool = False,
    shared: bool = False,
) -> ParamSpecs:
    """Returns the specs of the parameters that have one."""
    if rule is None:
        return ()
    specs = _of_leaves(rule, params)
    for (path, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(params), specs, strict=True):
        if spec is not None:
            _check(f"params{_name(path)}", jnp.shape(leaf), spec, mesh)
    groups = jax.eval_shape(to_groups, params)
    if jax.tree.structure(groups) == jax.tree.structure(params):
        marks = jax.tree.unflatten(jax.tree.structure(groups), [(s,) for s in specs])
    else:
        marks = _of_groups(specs, params, groups, to_groups)
    by_path: dict[str, PartitionSpec] = {}
    for group, tree in marks.items():
        if group != "layers":
            by_path |= _by_path(f"['{group}']", tree)
            continue
        for prefix, layers in ((f"[{k!r}]", tree[k]) for k in tree) if has_kinds else [("", tree)]:
            one = _of_one_layer(layers, f"params['layers']{prefix}")
            _check_stage(one, f"params['layers']{prefix}")
            by_path |= _by_path(f"['stages']{prefix}", one)
    if shared:  # a stage is given its layers and a copy of what they share
        stages = {n.removeprefix("['stages']"): s for n, s in by_path.items() if "['stages']" in n}
        by_path |= {f"['stages']['layers']{name}": spec for name, spec in stages.items()}
        copies = {n: s for n, s in by_path.items() if n.startswith("['shared']")}
        by_path |= {f"['stages']{name}": spec for name, spec in copies.items()}
    return tuple(by_path.items())


def _of_leaves(rule: Any, params: PyTree) -> list[PartitionSpec | None]:
    """Returns the spec of every leaf of `params`, None without one."""
    # A module of specs may be callable too, if the parameters are such a module.
    if callable(rule) and not isinstance(rule, PartitionSpec | type(params)):
        leaves = jax.tree_util.tree_leaves_with_path(params)
        leaf_specs: list[Any] = [rule(_name(path), leaf) for path, leaf in leaves]
        if all(spec is None for spec in leaf_specs):
            raise ValueError(
                "`param_specs` has no spec for any leaf of `params`, such as "
                f"{', '.join(_name(path) for path, _ in leaves[:4])}. Give one, or leave it out."
            )
        return leaf_specs

    def is_none(x: Any) -> bool:
        return x is None

    specs, structure = jax.tree.flatten(rule, is_leaf=is_none)
    ids = structure.unflatten(range(len(specs)))  # None is no leaf in errors of JAX
    try:
        spread = jax.tree.map(lambda i, tree: [specs[i]] * len(jax.tree.leaves(tree)), ids, params)
    except ValueError as error:
        raise ValueError(f"`param_specs` is no tree prefix of `params`: {error}") from error
    return jax.tree.leaves(spread, is_leaf=is_none)


def _check(name: str, shape: Sequence[int], spec: Any, mesh: Mesh) -> None:
    """Raises a `ValueError` if a parameter cannot be sharded by a spec."""
    start = f"`param_specs` has {spec} for `{name}` of shape {tuple(shape)}"
    if not isinstance(spec, PartitionSpec):
        raise ValueError(f"{start}. Give a `PartitionSpec`, or None for the default.")
    if len(spec) > len(shape):
        raise ValueError(f"{start}, which has fewer dims.")
    free = [axis for axis in mesh.axis_names if axis != "data"]
    unsplit = None, PartitionSpec.UNCONSTRAINED
    if not all(dim in unsplit or isinstance(dim, str | tuple | list) for dim in spec):
        raise ValueError(f"{start}. Give the name of an axis, or None, for each dim.")
    dims = [axes_of_dim(dim) for dim in spec]
    for dim, axes in enumerate(dims):
        for axis in axes:
            if axis not in free:
                why = "it divides rows" if axis == "data" else "`mesh` has no such axis"
                raise ValueError(
                    f"{start}, and {axis!r} is no axis for parameters: {why}. Name one of {free}."
                )
        count = math.prod(mesh.shape[axis] for axis in axes)
        if shape[dim] % count:
            raise ValueError(
                f"{start}, and dim {dim} of size {shape[dim]} does not divide over "
                f"{' and '.join(map(repr, axes))} of size {count}."
            )
    used = [axis for axes in dims for axis in axes]
    if len(set(used)) < len(used):
        raise ValueError(f"{start}, which has an axis twice.")


def _check_stage(marks: PyTree, name: str) -> None:
    """Raises a `ValueError` if a spec of a layer has the axis of stages."""
    for path, (spec,) in jax.tree_util.tree_leaves_with_path(marks, is_leaf=_is_mark):
        if spec is not None and "stage" in axes_of(spec):
            raise ValueError(
                f"`param_specs` has {spec} for `{name}{_name(path)}`, and 'stage' is no axis for "
                "parameters: the pipeline divides layers over it. Name another."
            )


def _of_groups(
    specs: list[PartitionSpec | None], params: PyTree, groups: PyTree, to_groups: Callable
) -> PyTree:
    """Returns the groups with (spec or None,) in place of leaves."""
    sources, structure = dependent_inputs(to_groups, params)
    ndims = [jnp.ndim(leaf) for leaf in jax.tree.leaves(params)]
    paths = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    marks = []
    for (used,), leaf in zip(sources, jax.tree.leaves(groups), strict=True):
        ids = [i for i, is_used in enumerate(jax.tree.leaves(used)) if is_used]
        first = specs[ids[0]] if ids else None
        if any(specs[i] != first or ndims[i] != ndims[ids[0]] for i in ids):
            raise ValueError(
                f"`param_specs` differs for {', '.join(paths[i] for i in ids[:8])}. The model "
                "stores them as one array: give all of them one spec."
            )
        added = len(leaf.shape) - ndims[ids[0]] if ids else 0
        if first is not None and added not in (0, 1):
            raise ValueError(
                f"`param_specs` has {first} for `params{paths[ids[0]]}`, which the model stores "
                f"in another form, with shape {tuple(leaf.shape)}. Leave it out."
            )
        marks.append((None if first is None else PartitionSpec(*(None,) * added, *first),))
    return jax.tree.unflatten(structure, marks)


def _of_one_layer(layers: PyTree, name: str) -> PyTree:
    """Returns the specs of a layer; of a list of layers all must be alike."""
    if isinstance(layers, list | tuple) and not _is_mark(layers):
        flat = [jax.tree_util.tree_leaves_with_path(layer, is_leaf=_is_mark) for layer in layers]
        for i, layer in enumerate(flat):
            for (path, (first_spec,)), (_, (spec,)) in zip(flat[0], layer, strict=False):
                if spec != first_spec:
                    raise ValueError(
                        f"`param_specs` has {first_spec} for `{name}[0]{_name(path)}` and {spec} "
                        f"for `{name}[{i}]{_name(path)}`. Layers of one pipeline run one program: "
                        "give a parameter the same spec in all layers."
                    )
        return layers[0]

    def without_layers(mark: tuple[PartitionSpec | None]) -> tuple[PartitionSpec | None]:
        if mark[0] is not None and len(mark[0]) and mark[0][0] is not None:
            raise ValueError(
                f"`param_specs` has {mark[0]} for a leaf of `{name}`, whose first dim are the "
                "layers. The pipeline divides these over 'stage': give None for the first dim."
            )
        return (None if mark[0] is None else PartitionSpec(*mark[0][1:]),)

    return jax.tree.map(without_layers, layers, is_leaf=_is_mark)


def _by_path(prefix: str, marks: PyTree) -> dict[str, PartitionSpec]:
    leaves = jax.tree_util.tree_leaves_with_path(marks, is_leaf=_is_mark)
    return {f"{prefix}{_name(path)}": spec for path, (spec,) in leaves if spec is not None}


def _is_mark(x: Any) -> bool:
    is_single = isinstance(x, tuple) and len(x) == 1
    return is_single and (x[0] is None or isinstance(x[0], PartitionSpec))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path)
