"""States whose stages lie apart from the first moment on: made, saved and restored in parts."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpipe.mpmd import MpmdArray, MpmdSharding, mpmd_jit_with_loop
from jaxpipe.mpmd.jaxpp import Interleaved1F1B, Std1F1B
from mpmd.small import (
    WIDTH,
    assert_close,
    assert_equal,
    batch,
    compare,
    gradients,
    groups,
    layers,
    marked_loss,
    runs,
    training,
)

RANKS = 4
INNER = (16, 24, 32, 40)
"""Of each stage another, so that a shape tells whose it is."""
OPTIMIZER = optax.adamw(1e-2)


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax adds counts and numbers of other types."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def first_state(key: Any) -> Any:
    def weights(i: int, inner: int) -> Any:
        a, b = jax.random.split(jax.random.fold_in(key, i))
        normal = jax.nn.initializers.normal(0.3)
        return {"in": normal(a, (WIDTH, inner)), "out": normal(b, (inner, WIDTH))}

    every = [weights(i, inner) for i, inner in enumerate(INNER)]
    return every, OPTIMIZER.init(every)


def stage_of(path: Any) -> int | None:
    """Of a leaf of a state, or None of those that belong to no stage."""
    found = [key.idx for key in path if isinstance(key, jax.tree_util.SequenceKey)]
    return found[-1] if isinstance(path[-1], jax.tree_util.DictKey) else None


def steps_and_specs(**axes: int) -> tuple[Any, Any, Any]:
    """The groups, a step, and where its state belongs, of which no number is there yet."""
    mesh = groups(RANKS, **axes)
    shapes = jax.eval_shape(first_state, jax.random.key(0))
    spec = {"in": P(*axes), "out": P(None, *axes)}
    specs = jax.tree_util.tree_map_with_path(
        lambda path, x: P() if stage_of(path) is None else spec[path[-1].key], shapes
    )
    step = mpmd_jit_with_loop(
        training(OPTIMIZER, Std1F1B(RANKS)),
        mesh,
        in_specs=(specs, None, None),
        out_specs=(specs, None),
        donate_argnums=0,
    )
    compiled = step.compile(shapes, *batch(4))
    return mesh, compiled, compiled.in_shardings[0][0]


def check_apart(state: Any, mesh: Any, axes: dict[str, int]) -> None:
    """Every leaf of a stage is on the devices of its group, each with its part, and on no other."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        stage = stage_of(path)
        assert leaf.mpmd_idxs == (tuple(range(RANKS)) if stage is None else (stage,))
        for rank in range(RANKS):
            array = leaf.on_rank(rank)
            assert (array is not None) == (rank in leaf.mpmd_idxs)
            if array is not None:
                assert array.devices() == set(mesh.unstack[rank].devices.flat)
                parts = axes.get("fsdp", 1) if stage is not None else 1
                assert {s.data.size for s in array.addressable_shards} == {leaf.size // parts}


@pytest.mark.parametrize("axes", [{}, {"fsdp": 2}], ids=["one_device", "fsdp2"])
def test_parameters_of_a_stage_are_initialised_on_its_own_devices_only(axes: dict[str, int]):
    """A state that is larger than any group: at no time does a device hold more than its part."""
    mesh, step, where = steps_and_specs(**axes)
    shapes = jax.eval_shape(first_state, jax.random.key(0))
    key = jax.random.key(3)
    before = {id(array) for array in jax.live_arrays()}
    init = mpmd_jit_with_loop(first_state, mesh, out_shardings=where).compile(key)
    seen: set[tuple[tuple[int, ...], Any]] = set()

    def watched(instruction: Any, act: Any) -> Any:
        def run(slots: Any) -> None:
            act(slots)
            for array in jax.live_arrays():
                if id(array) not in before and array.ndim == 2:
                    seen.update((array.shape, device) for device in array.devices())

        return run

    state = init.with_thunks(watched)(key)
    check_apart(state, mesh, axes)
    true = jax.jit(first_state)(key)
    assert_close(state, true)
    for shape, device in seen:
        (stage,) = {INNER.index(size) for size in shape if size != WIDTH}
        assert device in mesh.unstack[stage].devices
    assert {shape for shape, _ in seen} == {x.shape for x in jax.tree.leaves(shapes) if x.ndim}

    true_step = jax.jit(training(OPTIMIZER, Std1F1B(RANKS)))
    for _ in range(2):
        state, value = step(state, *batch(4))
        true, true_value = true_step(true, *batch(4))
    check_apart(state, mesh, axes)
    assert_close((state, value), (true, true_value))


def test_no_program_of_a_rank_computes_what_others_begin_with():
    mesh, _, where = steps_and_specs()
    program = (
        mpmd_jit_with_loop(first_state, mesh, out_shardings=where).lower(jax.random.key(0)).program
    )
    for instruction in runs(program):
        made = {n for s in instruction.graph.eqns for v in s.outputs for n in v.aval.shape}
        others = {n for i, n in enumerate(INNER) if i != instruction.rank}
        assert INNER[instruction.rank] in made and made.isdisjoint(others)


def test_weights_that_a_step_makes_for_itself_are_made_where_they_are_used():
    """Without a word about places: each group draws those of its own stages, here of two."""

    def step(key: Any, *data: Any) -> Any:
        weights, _ = first_state(key)
        return gradients(Interleaved1F1B(RANKS, 2))(weights, *data)

    args = jax.random.key(3), *batch(4)
    compare(step, groups(2), *args)
    program = mpmd_jit_with_loop(step, groups(2)).lower(*args).program
    for instruction in runs(program):
        if instruction.name == "before_loop":
            made = {n for s in instruction.graph.eqns for v in s.outputs for n in v.aval.shape}
            assert made.isdisjoint({n for i, n in enumerate(INNER) if i % 2 != instruction.rank})


def test_results_of_a_loop_go_where_they_are_asked_for():
    """A loss on all groups, and the gradients of the first stage on the last group."""
    mesh, weights = groups(3), layers(3)
    everywhere, last = (MpmdSharding(mesh, ranks, P()) for ranks in [(0, 1, 2), (2,)])
    value, grads = compare(
        gradients(Std1F1B(3), marked_loss),
        mesh,
        *(weights, *batch(4)),
        out_shardings=(everywhere, [last, None, P()]),
    )
    assert value.mpmd_idxs == (0, 1, 2)
    assert len({float(value.on_rank(rank)) for rank in range(3)}) == 1
    assert [g["in"].mpmd_idxs for g in grads] == [(2,), (1,), (2,)]
    assert grads[0]["in"].on_rank(2).devices() == set(mesh.unstack[2].devices.flat)


def test_results_on_groups_that_are_not_there():
    mesh = groups(2)
    where = MpmdSharding(groups(4), (3,), P())
    with pytest.raises(
        ValueError, match=r"`mpmd_indices` is \(3,\), and the mesh has the groups 0"
    ):
        mpmd_jit_with_loop(jnp.sin, mesh, out_shardings=where).lower(1.0)


def test_saving_and_restoring_a_state_in_parts(tmp_path: Any):
    """Each leaf from and to the devices of its group, which orbax divides: the same bits."""
    axes = {"fsdp": 2}
    mesh, step, where = steps_and_specs(**axes)
    state = mpmd_jit_with_loop(first_state, mesh, out_shardings=where)(jax.random.key(3))
    state, _ = step(state, *batch(4))

    def ranks(tree: Any) -> Any:
        return jax.tree.map(lambda x: {f"rank {r}": x.on_rank(r) for r in x.mpmd_idxs}, tree)

    saved = ranks(state)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), saved
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        read = checkpointer.restore(tmp_path / "state", shapes)

    def whole(leaf: MpmdArray, arrays: Any) -> MpmdArray:
        of_ranks = {rank: arrays[f"rank {rank}"] for rank in leaf.mpmd_idxs}
        return MpmdArray(list(of_ranks.values()), leaf.mpmd_sharding)

    restored = jax.tree.map(whole, state, read)
    check_apart(restored, mesh, axes)
    assert_equal(restored, state)
    for _ in range(2):
        state, value = step(state, *batch(4))
        restored, again = step(restored, *batch(4))
    assert_equal((restored, again), (state, value))
