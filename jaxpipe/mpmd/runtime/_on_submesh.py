"""Rewrites a program for the mesh of one group, whatever mesh it was traced with."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jax.sharding import Mesh, NamedSharding

from ...ir.graph import Cond, Eqn, Graph, PrimitiveCall, Scan, ShardMap
from ..api._mesh import check_memory_kind, check_spec


def on_submesh(graph: Graph, mesh: Mesh, mpmd_axis: str) -> Graph:
    """Replaces every mesh in a program by the mesh of a group."""
    eqns = tuple(replace(eqn, operation=_operation(eqn, mesh, mpmd_axis)) for eqn in graph.eqns)
    return replace(graph, eqns=eqns)


def _operation(eqn: Eqn, mesh: Mesh, mpmd_axis: str) -> Any:
    match eqn.operation:
        case Scan() as loop:
            return replace(loop, body=on_submesh(loop.body, mesh, mpmd_axis))
        case Cond(branches):
            inside = tuple(on_submesh(branch, mesh, mpmd_axis) for branch in branches)
            return Cond(inside, eqn.operation.num_accumulators)
        case ShardMap() as shards:
            if mpmd_axis in shards.axes and shards.mesh.shape[mpmd_axis] > 1:
                raise ValueError(
                    f"A `shard_map` inside a stage is over the axis {mpmd_axis!r} of all groups, "
                    "along which programs differ. Take the mesh from the context, "
                    "`jax.sharding.get_abstract_mesh()`: there it has size 1."
                )
            return replace(shards, body=on_submesh(shards.body, mesh, mpmd_axis), mesh=mesh)
        case PrimitiveCall("sharding_constraint", params=params) as plain:
            spec = params["sharding"].spec
            check_spec(spec, mpmd_axis, "`with_sharding_constraint` inside a stage")
            check_memory_kind(
                params["sharding"].memory_kind, mesh, "`with_sharding_constraint` inside a stage"
            )
            sharding = NamedSharding(mesh, spec)
            if not eqn.inputs:  # the constraint of a literal
                assert plain.equation is not None
                (literal,) = plain.equation.invars
                assert isinstance(literal, Literal)
                value = jnp.asarray(literal.val, eqn.outputs[0].aval.dtype)
                return replace(plain, run=lambda: [value], params={}, equation=None)
            params = {"sharding": spec, "dims": params["unconstrained_dims"]}
            return replace(plain, run=_constrain(sharding), params=params, equation=None)
    return eqn.operation


def _constrain(sharding: NamedSharding) -> Callable[[Any], Sequence[Any]]:
    return lambda x: [lax.with_sharding_constraint(x, sharding)]
