"""The engine `mpmd`: every rank runs programs of its own, by any schedule."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .. import mpmd, schedules
from ..autodiff import StagedModel
from ..autodiff.staged_model import run_layers, run_sliced_layers
from ..mpmd import api as mpmd_api
from ..schedules import Costs, Op, Schedule, Timeline, check, language, lock_step
from ..schedules.lock_step import Ticks
from ..sharding.layout import LayerLayout
from ._engine import Engine, PipelineSpec, Storage
from ._memory import Buffers, activation_cap
from ._scheduled import expected_buffers, memory
from .fsdp import param_spec_tree


def _prepare(
    schedule: Schedule | None,
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None,
    memory_cap: float | None,
) -> tuple[Schedule, Ticks | None]:
    del num_ranks, num_microbatches, costs
    if schedule is None:
        raise ValueError("`engine` is 'mpmd' and `schedule` is None. Give a schedule.")
    language.check_carried_state(check(schedule))
    activation_cap(schedule, memory_cap)  # raises if the order stores more
    return schedule, None


def _layout(schedule: Schedule | None, ranks: int, counts: tuple[int, ...]) -> LayerLayout:
    assert schedule is not None
    stages = list(map(len, language.stored_stages(schedule)))
    alike = len({*stages}) == len({*counts}) == 1
    return LayerLayout(max(stages), ranks, max(counts), None, None if alike else counts)


def _stack(spec: PipelineSpec, layers: PyTree) -> list[PyTree]:
    """Cuts [L, ...] leaves into a tree of [layers, ...] leaves for every stage."""
    ids = spec.layout.stage_layer_ids
    return [jax.tree.map(lambda leaf: leaf[r.start : r.stop], layers) for r in ids]  # noqa: B023


def _unstack(spec: PipelineSpec, stages: Sequence[PyTree]) -> PyTree:
    del spec
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *stages)


def _layer_keys(spec: PipelineSpec, dropout: PyTree, frozen: list[PyTree]) -> list[PyTree]:
    return list(zip(_stack(spec, dropout), frozen, strict=True))


def _share(spec: PipelineSpec, stages: list[Any], shared: PyTree) -> list[dict[str, Any]]:
    """Gives every stage what all layers share; and as keys [layers, 0] leaves if it has none."""

    def counted(stage: Any, num_layers: int) -> Any:
        is_empty = isinstance(stage, tuple) and not jax.tree.leaves(stage)
        return (jnp.zeros((num_layers, 0)), stage[1]) if is_empty else stage

    pairs = zip(spec.layout.stage_layer_ids, stages, strict=True)
    return [{"layers": counted(stage, len(ids)), "shared": shared} for ids, stage in pairs]


def _sum_shared(spec: PipelineSpec, stages: list[dict[str, Any]]) -> tuple[list[Any], PyTree]:
    """Returns the gradients of layers, and on all ranks those of what they share."""
    del spec
    sums = jax.tree.map(mpmd.cross_mpmd_all_reduce, *(stage["shared"] for stage in stages))
    return [stage["layers"] for stage in stages], sums


def _stage(spec: PipelineSpec, layer: Callable, run: Callable = run_layers) -> Callable:
    # A stage of equal ones may have no arrays that say how many layers it has.
    num_layers = None if spec.layout.counts else spec.layout.layers_per_stage
    return partial(run, spec.layer_remat(layer), num_layers=num_layers, scan=spec.scan_layers)


def _check_call(name: str) -> None:
    """Raises a `ValueError` if no function is being traced for a program for each rank."""
    if not mpmd_api.is_tracing():
        raise ValueError(
            f"`{name}` is called outside of `pipe.jit`, and the engine 'mpmd' compiles a program "
            f"for each rank. Decorate the function that calls it with `pipe.jit` in place of "
            f"`jax.jit` or `nnx.jit`, or call `pipe.jit(pipe.{name})`."
        )


def _bound(model: StagedModel, weights: dict[str, Any]) -> tuple[StagedModel, dict[str, Any]]:
    """Returns the model with its constants, and the weights without them."""
    groups = {name: tree for name, tree in weights.items() if name != "constants"}
    return model.with_constants(weights.get("constants", ())), groups


def _value(
    spec: PipelineSpec, model: StagedModel, weights: dict[str, Any], batch_inputs: Any, keys: Any
) -> Any:
    model, weights = _bound(model, weights)
    return mpmd_api.mpmd_value(model, weights, batch_inputs, keys, schedule=spec.schedule)


def _value_and_grad(
    spec: PipelineSpec, model: StagedModel, weights: dict[str, Any], batch_inputs: Any, keys: Any
) -> Any:
    model, weights = _bound(model, weights)
    return mpmd_api.mpmd_value_and_grad(
        model, weights, batch_inputs, keys, schedule=spec.schedule, remat=spec.remat
    )


def _put(spec: PipelineSpec, weights: dict[str, Any], tied: bool) -> dict[str, Any]:
    """Moves stages to their ranks; embedding and head to those of the first and last stage."""
    mesh = mpmd.MpmdMesh(spec.mesh, "stage")

    def put(leaf: jax.Array, sharding: mpmd.MpmdSharding) -> mpmd.MpmdArray:
        local = set(sharding.mpmd_idxs) & set(mesh.local_ranks)
        # Not the user's own array, which a donation of the stored one would delete.
        arrays = {r: jax.device_put(leaf, sharding.of_rank(r), may_alias=False) for r in local}
        return mpmd.MpmdArray.of_ranks(arrays, sharding, leaf.shape, leaf.dtype)

    return jax.tree.map(put, weights, _shardings(spec, weights, tied))


def _init(spec: PipelineSpec, make: Callable[[], dict[str, Any]], tied: bool) -> dict[str, Any]:
    """Makes the weights of every rank by a program of its own."""
    shapes = jax.eval_shape(make)
    return mpmd_api.init_on_ranks(lambda rank: make(), shapes, _shardings(spec, shapes, tied))


def _shardings(
    spec: PipelineSpec, weights: dict[str, Any], tied: bool, *, copies: bool = False
) -> dict[str, Any]:
    """Returns the ranks of every leaf, and its sharding over `fsdp` on them.

    A stage that several ranks run is stored on one of them, which sends it in every step; with
    `copies` all these ranks count.
    """
    assert spec.schedule is not None
    mesh = mpmd.MpmdMesh(spec.mesh, "stage")
    owners, running = language.owners(spec.schedule), language.ranks_by_stage(spec.schedule)
    stages = range(spec.schedule.num_stages)
    ranks = [running[stage] if copies else (owners[stage],) for stage in stages]
    first = tuple(sorted({*ranks[0], *(ranks[-1] if tied else ())}))
    every = tuple(range(spec.mesh.shape["stage"]))

    def of_tree(
        name: str, tree: PyTree, ranks: tuple[int, ...], lead: tuple[None, ...] = ()
    ) -> PyTree:
        specs = param_spec_tree(name, tree, spec.mesh, spec.param_specs, lead)
        return jax.tree.map(partial(mpmd.MpmdSharding, mesh, ranks), specs)

    pairs = zip(weights["stages"], ranks, strict=True)
    return {
        "embed": of_tree("embed", weights["embed"], first),
        "stages": [of_tree("stages", tree, of_stage, (None,)) for tree, of_stage in pairs],
        "head": of_tree("head", weights["head"], ranks[-1]),
        **({"shared": of_tree("shared", weights["shared"], every)} if "shared" in weights else {}),
    }


def _rank_bytes(
    spec: PipelineSpec, weights: dict[str, Any], tied: bool, *, copies: bool = False
) -> tuple[int, ...]:
    """Returns the bytes of weights on a device of every rank, as stored or with `copies`."""
    bytes_by_rank = [0] * spec.mesh.shape["stage"]
    where = jax.tree.leaves(_shardings(spec, weights, tied, copies=copies))
    for leaf, sharding in zip(jax.tree.leaves(weights), where, strict=True):
        for rank in sharding.mpmd_idxs:
            shape = sharding.of_rank(rank).shard_shape(leaf.shape)
            bytes_by_rank[rank] += math.prod(shape) * leaf.dtype.itemsize
    return tuple(bytes_by_rank)


def _put_like(
    spec: PipelineSpec, weights: dict[str, Any], like: dict[str, Any], tied: bool
) -> dict[str, Any]:
    """Puts new arrays of every stage, and of embedding and head, on the ranks of their weights."""
    del spec, tied

    def with_leaf(tree: PyTree, other: PyTree) -> PyTree:
        leaves = jax.tree.leaves(other)
        return mpmd.place_with(tree, leaves[0]) if leaves else tree

    others = [name for name in weights if name != "stages"]
    placed = {name: with_leaf(weights[name], like.get(name, ())) for name in others}
    pairs = zip(weights["stages"], like["stages"], strict=True)
    return placed | {"stages": [with_leaf(*pair) for pair in pairs]}


def _gather(spec: PipelineSpec, tree: PyTree) -> PyTree:
    """Copies arrays to the first device; all ranks must belong to this process."""

    def gather_leaf(leaf: Any) -> jax.Array:
        if not isinstance(leaf, mpmd.MpmdArray):
            return leaf
        array = leaf.first_mpmd_replica
        if array is None:
            raise ValueError(
                "`unshard` was called where ranks belong to several processes. Save the parameters "
                "as they are stored, or convert them with `mpmd.mpmd_to_spmd_reshard`."
            )
        return jax.device_put(array, spec.mesh.devices.flat[0], may_alias=False)

    return jax.tree.map(gather_leaf, tree)


def _jit(spec: PipelineSpec, function: Callable, donate_argnums: tuple[int, ...]) -> Callable:
    mesh = mpmd.MpmdMesh(spec.mesh, "stage")
    options = None if spec.compiler_options is None else dict(spec.compiler_options)
    return mpmd.mpmd_jit_with_loop(
        function, mesh, donate_argnums=donate_argnums, compiler_options=options
    )


def _timeline(spec: PipelineSpec, costs: Costs) -> Timeline:
    assert spec.schedule is not None
    return schedules.simulate(spec.schedule, costs)


def _buffers(spec: PipelineSpec) -> tuple[Buffers, ...]:
    """Returns the buffers of every rank by the order of its actions; of slices as in ticks."""
    assert spec.schedule is not None
    past: dict[str, Any] = {}
    num_slices = language.num_slices(spec.schedule)
    if num_slices > 1:
        slots = lock_step.buffer_slots(lock_step.to_lock_step(spec.schedule))
        past = {name: slots[name] for name in ("past", "past_cotangents")}
        past |= {"num_slices": num_slices}
    peaks = schedules.peak_activations(spec.schedule)
    rows = zip(peaks, spec.schedule.programs, strict=True)
    return tuple(
        Buffers(peak, wgrad_residuals=_most_deferred(row), activations=3, **past)
        for peak, row in rows
    )


def _most_deferred(program: tuple[language.ScheduleStep, ...]) -> int:
    """Returns the most microbatches of stages whose I has run and whose W has not."""
    changes = {Op.I: 1, Op.W: -1}
    actions = (action for step in program for action in language.actions_of(step))
    return max(accumulate(changes.get(action.op, 0) for action in actions), default=0)


MPMD = Engine(
    name="mpmd",
    config_name="mpmd",
    runs_schedules=True,
    options=frozenset(),
    storage=Storage(
        per_stage=True,
        stack=_stack,
        unstack=_unstack,
        share=_share,
        own_copy=itemgetter("shared"),
        sum_shared=_sum_shared,
        layer_keys=_layer_keys,
        put=_put,
        shardings=_shardings,
        rank_bytes=_rank_bytes,
        init=_init,
        put_like=_put_like,
        gather=_gather,
    ),
    prepare=_prepare,
    layout=_layout,
    stage=_stage,
    value=_value,
    value_and_grad=_value_and_grad,
    step_bytes=partial(_rank_bytes, copies=True),
    jit=_jit,
    timeline=_timeline,
    buffers=_buffers,
    expected_buffers=expected_buffers,
    memory=memory,
    may_divide=lambda spec: True,
    has_branches=lambda spec: False,
    sliced_stage=partial(_stage, run=run_sliced_layers),
    program_per_rank=True,
    check_call=_check_call,
)
