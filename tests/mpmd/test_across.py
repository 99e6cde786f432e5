"""Values of several groups in one, and values where others are."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.mpmd import (
    MpmdArray,
    cross_mpmd_all_reduce,
    cross_mpmd_stack,
    mark_stage_end,
    mpmd_jit_with_loop,
    place_with,
)
from jaxpipe.mpmd.jaxpp import GPipe, Std1F1B, ZeroBubble
from mpmd.small import WIDTH, batch, compare, gradients, groups, layers, numbers, sends


def norms(grads: Any) -> list[Any]:
    """The sum of squares of each stage."""
    return [sum(jnp.sum(g**2) for g in jax.tree.leaves(of_stage)) for of_stage in grads]


def check_copies(array: MpmdArray, ranks: tuple[int, ...]) -> None:
    """It is on these groups, and the same on each, on the devices of that group."""
    assert array.mpmd_idxs == ranks
    copies = {rank: array.on_rank(rank) for rank in ranks}
    for rank, copy in copies.items():
        assert copy is not None
        assert copy.devices() == set(array.mpmd_sharding.mpmd_mesh.unstack[rank].devices.flat)
        np.testing.assert_array_equal(np.asarray(copy), np.asarray(copies[ranks[0]]))


@pytest.mark.parametrize("schedule", [Std1F1B(3), ZeroBubble(3)], ids=str)
def test_cross_mpmd_all_reduce(schedule: Any):
    """The global norm by hand, and an update with it: one number leaves each group."""

    def step(weights: Any, *data: Any) -> Any:
        value, grads = gradients(schedule)(weights, *data)
        norm = jnp.sqrt(cross_mpmd_all_reduce(*norms(grads)))
        new = jax.tree.map(lambda w, g: w - 0.1 * g / norm, weights, grads)
        return value, norm, new

    args = layers(3), *batch(4)
    _, norm, new = compare(step, groups(3), *args)
    check_copies(norm, (0, 1, 2))
    assert [w["in"].mpmd_idxs for w in new] == [(0,), (1,), (2,)]
    program = mpmd_jit_with_loop(step, groups(3)).lower(*args).program
    after = [s for s in sends(program) if "after_loop" in s.name]
    assert {(s.rank, s.to) for s in after} == {(a, b) for a in range(3) for b in range(3) if a != b}
    assert all(buffer.value.aval.shape == () for send in after for buffer in send.buffers)


def test_cross_mpmd_all_reduce_of_arrays_on_groups_of_several_devices():
    """Two of three groups: the third has nothing of it."""

    def step(weights: Any, *data: Any) -> Any:
        value, grads = gradients(GPipe(3))(weights, *data)
        return value, cross_mpmd_all_reduce(grads[0]["in"], grads[2]["in"])

    _, total = compare(step, groups(3, fsdp=2), layers(3), *batch(4))
    check_copies(total, (0, 2))


def test_cross_mpmd_all_reduce_of_one_group_and_of_one_array():
    def step(weights: Any, *data: Any) -> Any:
        _, grads = gradients(Std1F1B(2))(weights, *data)
        first, second = grads[1]["in"], weights[1]["in"] * 2
        return cross_mpmd_all_reduce(first, first + second), cross_mpmd_all_reduce(grads[0]["out"])

    both, one = compare(step, groups(2), layers(2), *batch(3))
    check_copies(both, (1,))
    check_copies(one, (0,))


def test_cross_mpmd_stack_on_several_groups():
    def step(weights: Any, *data: Any) -> Any:
        _, grads = gradients(Std1F1B(3))(weights, *data)
        two = [grads[2]["in"], grads[0]["in"]]
        return cross_mpmd_stack(norms(grads)), cross_mpmd_stack(two), cross_mpmd_stack(two, 1)

    of_norms, of_arrays, along = compare(step, groups(3), layers(3), *batch(4))
    check_copies(of_norms, (0, 1, 2))
    check_copies(of_arrays, (0, 2))
    check_copies(along, (0, 2))
    assert of_norms.shape == (3,) and of_arrays.shape == (2, WIDTH, 2 * WIDTH)
    assert along.shape == (WIDTH, 2, 2 * WIDTH)


def test_cross_mpmd_stack_on_one_group():
    """Arrays of one group stay there, as does a single one, also where all is on one group."""

    def step(weights: Any, *data: Any) -> Any:
        _, grads = gradients(Std1F1B(2))(weights, *data)
        two = cross_mpmd_stack([grads[1]["in"], grads[1]["in"] ** 2])
        return two, cross_mpmd_stack([grads[0]["out"]])

    two, one = compare(step, groups(2), layers(2), *batch(3))
    check_copies(two, (1,))
    check_copies(one, (0,))

    def alone(weights: Any, *data: Any) -> Any:
        value, grads = gradients(Std1F1B(1))(weights, *data)
        return value, cross_mpmd_stack([*jax.tree.leaves(norms(grads)), value])

    _, stacked = compare(alone, groups(1), layers(1), *batch(3))
    check_copies(stacked, (0,))


def test_both_without_a_loop():
    def step(x: Any, y: Any) -> Any:
        return cross_mpmd_all_reduce(x, y, x), cross_mpmd_stack([x, y])

    compare(step, groups(2), numbers(0, 3), numbers(1, 3))


def test_place_with():
    """Without it a step goes where the largest of its inputs is."""

    def step(weights: Any, *data: Any, placed: bool) -> Any:
        value, grads = gradients(Std1F1B(3))(weights, *data)
        mean = {"in": grads[2]["in"] / 3, "norm": jnp.sum(grads[2]["out"] ** 2)}
        if placed:
            mean = place_with(mean, grads[0]["out"])
        return value, mean, weights[0]["in"] - mean["in"] * 0.1

    for placed, rank in [(False, 2), (True, 0)]:
        _, mean, new = compare(
            lambda *args, placed=placed: step(*args, placed=placed),
            groups(3),
            *(layers(3), *batch(4)),
        )
        check_copies(mean["in"], (rank,))
        check_copies(mean["norm"], (rank,))
        check_copies(new, (0,))


def test_place_with_an_array_of_several_groups():
    weights = {"shared": numbers(5, WIDTH, WIDTH) / 4, "stages": layers(3)}

    def step(weights: Any, *data: Any) -> Any:
        def loss(weights: Any, x: Any, y: Any) -> Any:
            for i, w in enumerate(weights["stages"]):
                x = x @ weights["shared"] if i != 1 else x
                x = mark_stage_end(x + jnp.tanh(x @ w["in"]) @ w["out"])
            return jnp.mean((x - y) ** 2)

        value, _ = gradients(Std1F1B(3), loss)(weights, *data)
        return place_with(value, weights["shared"])

    check_copies(compare(step, groups(3), weights, *batch(4)), (0, 2))


def test_arrays_that_do_not_go_together():
    for together in (lambda *arrays: cross_mpmd_stack(arrays), cross_mpmd_all_reduce):
        with pytest.raises(ValueError, match=r"`cross_mpmd_\w+` is given arrays of"):
            together(jnp.ones(2), jnp.ones(3))
        with pytest.raises(ValueError, match="Give one array or more"):
            together()


def test_a_stack_along_a_dim_that_it_has_not():
    with pytest.raises(ValueError, match=r"`axis` is 2, .* arrays of 1 dims .* Give -2 to 1"):
        cross_mpmd_stack([jnp.ones(2)], axis=2)
