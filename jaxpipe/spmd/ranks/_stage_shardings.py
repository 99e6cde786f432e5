"""Translation of shardings that a stage names, where some axes of the mesh are already manual.

A layer is written for the whole mesh: it constrains an activation to `NamedSharding(mesh,
P("fsdp"))`. Inside a pipeline each rank runs its own stage, so the axis `stage` and the batch axes,
if any, are manual: an array of a stage is not sharded over them. Those axes are removed from the
shardings that a stage names; the other axes have the same meaning as outside the pipeline.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
from jax.sharding import NamedSharding

from ..._compat import translated_shardings
from ...sharding.specs import without_axes
from ._nested_shard_map import nested_shard_map
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
    return _translating(on_automatic_axes, f, nested_shard_map, pvary)


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
