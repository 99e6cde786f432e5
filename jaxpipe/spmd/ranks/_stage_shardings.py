"""Shardings and shard maps that a stage names, where some axes of the mesh are already manual.

A layer is written for the whole mesh: it constrains an activation to `NamedSharding(mesh,
P("fsdp"))`. Inside a pipeline each rank runs its own stage, so the axis `stage` and the batch axes,
if any, are manual: an array of a stage is not sharded over them. Those axes are removed from the
shardings that a stage names; the other axes have the same meaning as outside the pipeline.

A layer may also run a kernel in `jax.shard_map(mesh=mesh, ...)`, and JAX refuses that mesh where
some of its axes are manual. The call is replaced by a `jax.shard_map` over the other axes. The
manual axes are removed from its specs: a device already has its own shard along them.

JAX cannot differentiate that call correctly: with `check_vma=False` it takes the results for equal
on all ranks and would sum the gradients of the ranks; with `check_vma=True` jax 0.10.2 fails ("must
have all manual axes come before free axes"). So the call has a custom VJP, by JAX's rules for
`check_vma=False`: cotangents are divided among devices that share a result, and gradients are
summed over the devices that share an argument.
"""

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..._compat import ABORTS_ON_UNSORTED_MANUAL_AXES, translated_shardings
from ...ir.graph import select
from ...sharding.specs import axes_of, without_axes
from ._varying import pvary


def on_automatic_axes(sharding: NamedSharding) -> NamedSharding:
    """Returns `sharding` over the mesh in context, without the axes that are manual there.

    A sharding of another mesh (other names or sizes of axes), or one that names no manual axis of
    the mesh in context, is returned as it is.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = frozenset(mesh.manual_axes)
    named_mesh = sharding.mesh.abstract_mesh
    if not manual or tuple(named_mesh.shape.items()) != tuple(mesh.shape.items()):
        return sharding
    spec = without_axes(sharding.spec, manual)
    if named_mesh == mesh and spec == sharding.spec:
        return sharding
    return NamedSharding(mesh, spec)


def in_stage(f: Callable) -> Callable:
    """Returns `f`, whose callees may name shardings over the whole mesh while they are traced.

    They may also call `jax.shard_map` over the whole mesh, and a user's function may have loops
    that begin with constants.
    """
    return _translating(on_automatic_axes, f, _nested_shard_map, pvary)


def at_init(f: Callable) -> Callable:
    """Returns `f`, whose callees may constrain arrays to explicit axes while they are traced.

    A layer's `init` makes arrays that are not split yet, and JAX would compare their types with the
    constraint. They are split once they are stacked.
    """
    return _translating(lambda sharding: NamedSharding(sharding.mesh, sharding.spec), f)


def _translating(
    translate: Callable[[NamedSharding], NamedSharding],
    f: Callable,
    nest: Callable[..., Callable] | None = None,
    vary: Callable[[Any], Any] | None = None,
) -> Callable:
    @wraps(f)
    def traced(*arguments: Any) -> Any:
        with translated_shardings(translate, nest, vary=vary):
            return f(*arguments)

    return traced


class _Call(NamedTuple):
    """A call on shards, its trees flattened.

    Attributes:
        f_of_shards: From differentiable and other leaves of the arguments to those of the results.
    """

    f_of_shards: Callable[[tuple, tuple], tuple[tuple, tuple]]
    axes: dict[str, int]
    ins: tuple[tuple, tuple]
    outs: tuple[tuple, tuple]


def _nested_shard_map(
    f: Callable,
    plain: Callable,
    *,
    mesh: Any,
    in_specs: PyTree,
    out_specs: PyTree,
    axis_names: Any,
    check_vma: bool,
) -> Callable:
    """Returns `jax.shard_map(f, ...)`, which may be called where axes of `mesh` are manual.

    `plain`, the result of JAX's `shard_map`, is called where no axis is manual, or `mesh` is not
    the whole mesh in context. Elsewhere `check_vma` is not read.
    """
    del check_vma

    @wraps(f)
    def call(*arguments: Any) -> Any:
        context = jax.sharding.get_abstract_mesh()
        manual = frozenset(context.manual_axes)
        is_whole = dict(mesh.shape) == dict(context.shape) and mesh.abstract_mesh != context
        if not (manual and is_whole and all(map(_is_leaf, jax.tree.leaves(in_specs)))):
            return plain(*arguments)
        names = [axis for axis in axis_names or context.axis_names if axis not in manual]
        if not names:
            return f(*arguments)
        axes = {axis: context.shape[axis] for axis in _as_xla_takes_them(names, context)}
        return _run(f, axes, _without(in_specs, manual), _without(out_specs, manual), arguments)

    return call


def _as_xla_takes_them(names: list[str], mesh: AbstractMesh) -> list[str]:
    """Returns the axes of a call over the axes `names`, and more if XLA would abort.

    Raises:
        ValueError: If it would abort, and the other automatic axes have several devices.
    """
    manual = [axis for axis in mesh.axis_names if axis in mesh.manual_axes]
    automatic = [axis for axis in mesh.axis_names if axis not in manual]
    several = [axis for axis in automatic if mesh.shape[axis] > 1]
    before = mesh.axis_names[: mesh.axis_names.index(manual[-1])]
    early = [axis for axis in before if axis in names]
    if not ABORTS_ON_UNSORTED_MANUAL_AXES or not early:
        return names
    if set(several) <= set(names):
        return automatic
    raise ValueError(
        f"A layer has a `jax.shard_map` over {names}. The axis {early[0]!r} precedes "
        f"{manual[-1]!r} in the mesh, where XLA aborts if others of {several} stay automatic. Give "
        f"specs over all of {several} and leave out `axis_names`, or order the axes of the mesh as "
        f"{[*manual, *several]}, with `jax.make_mesh`."
    )


def _run(
    f: Callable, axes: dict[str, int], in_specs: PyTree, out_specs: PyTree, arguments: tuple
) -> Any:
    """Calls `f` on shards over `axes`."""
    leaves, tree = jax.tree.flatten(arguments)
    specs = _specs_of_leaves(in_specs, arguments)
    is_dynamic = [spec is not None for spec in specs]
    is_float = [dynamic and _is_float(x) for x, dynamic in zip(leaves, is_dynamic, strict=True)]
    is_other = [a and not b for a, b in zip(is_dynamic, is_float, strict=True)]

    def f_of_leaves(floats: tuple, constants: tuple) -> Any:
        more_floats, more_constants = iter(floats), iter(constants)
        merged = [
            next(more_floats) if first else next(more_constants) if second else leaf
            for leaf, first, second in zip(leaves, is_float, is_other, strict=True)
        ]
        return f(*jax.tree.unflatten(tree, merged))

    ins = select(specs, is_float), select(specs, is_other)
    dynamic = select(leaves, is_float), select(leaves, is_other)
    on_shards = partial(jax.shard_map, axis_names={*axes}, check_vma=False)
    shapes = jax.eval_shape(on_shards(f_of_leaves, in_specs=ins, out_specs=out_specs), *dynamic)
    results, out_tree = jax.tree.flatten(shapes)
    is_trained = [_is_float(x) for x in results]
    is_rest = [not x for x in is_trained]

    def f_of_shards(floats: tuple, constants: tuple) -> tuple[tuple, tuple]:
        outputs = jax.tree.leaves(f_of_leaves(floats, constants))
        return select(outputs, is_trained), select(outputs, is_rest)

    leaf_specs = _specs_of_leaves(out_specs, shapes)
    outs = select(leaf_specs, is_trained), select(leaf_specs, is_rest)
    run = _differentiable(_Call(f_of_shards, axes, ins, outs))
    floats, constants = map(iter, run(*jax.tree.map(pvary, dynamic)))
    outputs = [next(floats if first else constants) for first in is_trained]
    return jax.tree.unflatten(out_tree, outputs)


def _differentiable(call: _Call) -> Callable[[tuple, tuple], tuple[tuple, tuple]]:
    """Returns `call.f_of_shards` as a function of whole arrays, with its derivative."""
    on_shards = partial(jax.shard_map, axis_names={*call.axes}, check_vma=False)
    one_each = PartitionSpec(tuple(call.axes))  # residuals: each device stores its own
    sharing_in, sharing_out = (
        [_sharing(spec, call.axes) for spec in specs] for specs in (call.ins[0], call.outs[0])
    )

    @jax.custom_vjp
    def run(floats, constants):
        def on_shard(*arguments):
            return call.f_of_shards(*_as_equal(arguments))

        on_all = on_shards(on_shard, in_specs=call.ins, out_specs=call.outs)
        return jax.tree.map(pvary, on_all(floats, constants))

    def forward(floats, constants):
        def on_shard(floats, constants):
            y, pull_back, rest = jax.vjp(
                lambda x: call.f_of_shards(x, constants), floats, has_aux=True
            )
            return (y, rest), pull_back

        def keep(*arguments):
            results, pull_back = on_shard(*_as_equal(arguments))
            return results, jax.tree.map(lambda x: jnp.expand_dims(x, 0), pull_back)

        outs = call.outs, one_each
        on_all = on_shards(keep, in_specs=call.ins, out_specs=outs)
        return jax.tree.map(pvary, on_all(floats, constants))

    def backward(pull_back, gradients):
        def pull(pull_back, gradients):
            parts = tuple(
                g / math.prod(call.axes[axis] for axis in axes) if axes else g
                for g, axes in zip(_as_equal(gradients), sharing_out, strict=True)
            )
            (float_grads,) = jax.tree.map(lambda x: jnp.squeeze(x, 0), pull_back)(parts)
            return tuple(
                jax.lax.psum(x, axes) if axes else x
                for x, axes in zip(float_grads, sharing_in, strict=True)
            )

        on_all = on_shards(pull, in_specs=(one_each, call.outs[0]), out_specs=call.ins[0])
        return jax.tree.map(pvary, on_all(pull_back, gradients[0])), None

    run.defvjp(forward, backward)
    return run


def _as_equal(tree: PyTree) -> PyTree:
    """Returns `tree` with types that vary over no axis, for use with `check_vma=False`."""
    # Under `check_vma=False` the result of an operation varies over no axis, but an argument keeps
    # its varying axes: types then differ where JAX requires equal ones.
    return jax.tree.map(lambda x: jax.lax.squeeze(jax.lax.expand_dims(x, [0]), [0]), tree)


def _specs_of_leaves(specs: PyTree, tree: PyTree) -> list:
    """Returns the spec of every leaf of `tree`, of which `specs` is a prefix."""
    leaf_specs: list = []

    def below(spec: Any, subtree: PyTree) -> None:
        leaf_specs.extend([spec] * len(jax.tree.leaves(subtree)))

    jax.tree.map(below, specs, tree, is_leaf=_is_leaf)
    return leaf_specs


def _sharing(spec: PartitionSpec, axes: dict[str, int]) -> tuple[str, ...]:
    """Returns the axes of more than one device over which `spec` replicates an array."""
    return tuple(axis for axis, size in axes.items() if size > 1 and axis not in axes_of(spec))


def _without(specs: PyTree, axes: frozenset[str]) -> PyTree:
    """Returns `specs` with no dim split over any of `axes`."""

    def rest(spec: PartitionSpec | None) -> PartitionSpec | None:
        return None if spec is None else without_axes(spec, axes)

    return jax.tree.map(rest, specs, is_leaf=_is_leaf)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)


def _is_leaf(x: Any) -> bool:
    return isinstance(x, PartitionSpec | None)
