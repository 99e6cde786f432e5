"""The `Gather` of a Flax module's weights, from the names of their dims.

Flax's rules may have several entries for a name, and the first that fits an array counts. So names
are resolved weight by weight, and the engine gets "logical axes" that say mesh axes: "fsdp+tensor"
is a dim that is split over both.
"""

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import PyTree

from ._gather import Gather, When, gather_weights
from ._placement import gather_stage
from ._ranks import names_of

EXPERTS = "exp"
"""The name of the dim of routed experts, which stays split over "expert"."""


def gather_of_names(
    weights: PyTree,
    names: PyTree,
    specs: PyTree,
    *,
    mesh: Mesh | None,
    when: When,
    batch_axes: tuple[str, ...] = (),
) -> Gather:
    """How the weights of one stage become whole over fsdp, context and expert.

    Args:
        weights: [R, S, L, ...] leaves.
        names: Their logical specs.
        specs: Their physical specs. Dims that they do not reach are whole on every device.
        mesh: The mesh, or None.
        when: As in `Gather`.
        batch_axes: As in `Gather`.
    """
    if mesh is None:
        return Gather(when)
    if AxisType.Explicit in mesh.axis_types and not batch_axes:
        of_ranks = jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), specs, is_leaf=_is_spec)
        whole = gather_stage(of_ranks)
        return Gather(when, whole=whole, hold=whole, scatter=gather_stage(of_ranks, ()))
    rules: dict[str, tuple[str, ...]] = {}

    def logical(w: jax.Array, name: PartitionSpec, spec: PartitionSpec) -> tuple[str | None, ...]:
        dims = [_encode(*dim, rules) for dim in zip(name[2:], spec[2:], strict=True)]
        return (*dims, *[None] * (w.ndim - 2 - len(dims)))

    axes = jax.tree.map(logical, weights, names, specs)
    return gather_weights(axes, list(rules.items()), when=when, batch_axes=batch_axes)


def _encode(name: Any, entry: Any, rules: dict[str, tuple[str, ...]]) -> str | None:
    axes = names_of(entry)
    if not axes:
        return None
    code = EXPERTS if name == EXPERTS else "+".join(axes)
    rules[code] = axes
    return code


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
