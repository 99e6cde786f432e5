"""The halves of a program compute what it did, have few residuals, and do nothing costly twice."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec

from jaxpipe import sharding
from jaxpipe.ir.graph import Cond, Graph, PrimitiveCall, Scan, ShardMap, to_graph
from jaxpipe.ir.transforms import InputKind, Partition, minimal_cut, partition

n = 4
x, y, matrix = jnp.arange(1.0, n + 1), jnp.ones(n), jnp.eye(n) + 0.1


def divided(
    f: Callable, *arguments: Any, first: Sequence[bool] = (True, False), kind: InputKind = "saved"
) -> Partition:
    """The halves of a function of arrays that returns a tuple, after a check of their numbers."""
    kinds: list[InputKind] = [kind] * len(arguments)
    halves = partition(to_graph(jax.make_jaxpr(f)(*arguments)), first, kinds)
    now, later = run(halves, first, *arguments)
    true = f(*arguments)
    for got, wanted in ((now, True), (later, False)):
        assert_equal(
            got, [t for t, is_first in zip(true, first, strict=True) if is_first == wanted]
        )
    return halves


def run(halves: Partition, first: Sequence[bool], *arguments: Any) -> tuple[list, list]:
    """What each half returns, without residuals."""
    outputs = jax.jit(halves.first.__call__)(*arguments)
    residuals = outputs[sum(first) :]
    again = [x for x, reads in zip(arguments, halves.reads, strict=True) if reads]
    return outputs[: sum(first)], jax.jit(halves.second.__call__)(*again, *residuals)


def assert_equal(got: Sequence[Any], true: Sequence[Any]) -> None:
    for a, b in zip(got, true, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def residuals(halves: Partition) -> list[tuple[tuple[int, ...], str]]:
    """Shape and dtype of each residual."""
    given = halves.second.inputs[sum(halves.reads) :]
    return [(residual.aval.shape, residual.aval.dtype.name) for residual in given]


def names(part: Graph) -> list[str]:
    """The primitives of a half, those in its loops too."""
    found = []
    for eqn in part.eqns:
        match eqn.operation:
            case Scan(body) | ShardMap(body):
                found += names(body)
            case Cond(branches):
                found += [name for branch in branches for name in names(branch)]
            case PrimitiveCall(name):
                found.append(name)
    return found


def test_the_first_half_has_what_its_outputs_need_and_nothing_else():
    halves = divided(lambda x, y: (jnp.cumsum(x), jnp.sort(x) * y), x, y)
    assert names(halves.first) == ["cumsum"] and names(halves.second) == ["sort", "mul"]
    assert residuals(halves) == [] and halves.reads == (True, True)


def test_what_costs_much_is_a_residual_and_not_computed_twice():
    halves = divided(lambda x: (jnp.cumsum(jnp.cumsum(x)), jnp.sort(jnp.cumsum(x))), x)
    assert names(halves.first).count("cumsum") + names(halves.second).count("cumsum") == 3

    def f(x):
        once = jnp.cumsum(x)
        return jnp.cumsum(once), jnp.sort(once)

    halves = divided(f, x)
    assert residuals(halves) == [((n,), "float32")] and halves.reads == (False,)
    assert names(halves.second) == ["sort"]


def test_the_smaller_of_a_value_and_its_cast_is_a_residual():
    def f(x):
        narrow = jnp.cumsum(x).astype(jnp.bfloat16)
        wide = jnp.sin(narrow.astype(jnp.float32))
        return jnp.cumsum(wide), jnp.sort(wide)

    halves = divided(f, x)
    assert residuals(halves) == [((n,), "bfloat16")]
    assert names(halves.second) == ["convert_element_type", "sin", "sort"]


def test_a_scalar_is_a_residual_and_not_what_is_computed_from_it():
    def f(x):
        whole = jnp.full((n, n), jnp.cumsum(x)[0])
        return whole @ x, jnp.sort(whole)

    assert residuals(divided(f, x)) == [((), "float32")]


def test_a_sum_is_made_early_where_it_is_smaller_than_what_it_adds_up():
    def f(x):
        many = jnp.cumsum(x)
        return jnp.cumsum(many), jnp.sum(many * many)

    halves = divided(f, x)
    assert residuals(halves) == [((), "float32")] and names(halves.second) == []


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_of_equal_bytes_those_are_residuals_from_which_least_is_computed_again(dtype: Any):
    """As a gated MLP: the gradients of its weights read what those of its input have computed."""

    def f(gate, up, dy):
        share = jax.nn.sigmoid(gate.astype(jnp.float32)).astype(dtype)
        dgate, dup = dy * up * share, dy * gate * share
        late = jnp.sort(gate * share * up), jnp.sort(dgate), jnp.sort(dup)
        return dgate @ matrix.astype(dtype) + dup @ matrix.astype(dtype), *late

    program = to_graph(jax.make_jaxpr(f)(*[jnp.ones(n, dtype)] * 3))
    kinds: list[InputKind] = ["dead"] * 3
    halves = partition(program, (True, False, False, False), kinds)
    assert names(halves.second) == ["sort", "sort", "sort"]
    assert residuals(halves) == [((n,), jnp.dtype(dtype).name)] * 3


def test_what_the_second_half_alone_needs_is_computed_there_if_it_keeps_no_more():
    halves = divided(lambda x: (jnp.cumsum(x), jnp.sort(jnp.sin(x))), x, kind="dead")
    assert names(halves.first) == ["cumsum"] and names(halves.second) == ["sin", "sort"]


def test_what_another_residual_needs_is_not_computed_twice():
    def f(x, y):
        a = jnp.cumsum(x)
        u = jnp.sin(a)
        return jnp.cumsum(a), jnp.sort(u), jnp.sum(u * y)

    halves = divided(f, x, y, first=(True, False, False), kind="dead")
    assert names(halves.second) == ["sort"] and len(residuals(halves)) == 2


def test_residuals_that_are_returned_anyway_are_taken_as_they_are_returned():
    wide = jnp.arange(12.0).reshape(3, n)

    def branch(*moves: Callable) -> Callable:
        def of(x):
            a = jnp.cumsum(x, 0)
            late = a
            for move in moves:
                late = move(late)
            return jnp.cumsum(a, 0), jnp.sort(late.ravel())

        return of

    def choice(x):
        turned = branch(jnp.transpose, jnp.sin)
        return lax.cond(x[0, 0] < 1, branch(), turned, x)

    halves = divided(choice, wide, kind="dead")
    assert residuals(halves) == [((3, n), "float32"), ((), "bool")]

    def loop(xs):
        def turn(carry, x):
            a = jnp.cumsum(x + carry, 0)
            return jnp.sum(a), (a, jnp.sort(jnp.sin(a.T), 0))

        carry, (a, late) = lax.scan(turn, 0.0, xs)
        return carry, jnp.cumsum(a, 0), late, jnp.sort(a, 0)

    halves = divided(loop, wide[None], first=(True, True, False, False), kind="dead")
    assert residuals(halves) == [((1, 3, n), "float32")]


def test_what_is_computed_from_recomputable_inputs_is_no_residual():
    def f(w, x):
        cast = jnp.transpose(w.astype(jnp.bfloat16)).astype(jnp.float32)
        return cast @ x, jnp.sort(cast, axis=0)

    arguments = matrix, x
    halves = partition(
        to_graph(jax.make_jaxpr(f)(*arguments)), (True, False), ("recomputable", "dead")
    )
    assert residuals(halves) == [] and halves.reads == (True, False)


def test_a_dead_input_is_a_residual_like_any_other():
    halves = divided(lambda x: (jnp.cumsum(x), jnp.sort(x * 2)), x, kind="dead")
    assert residuals(halves) == [((n,), "float32")] and halves.reads == (False,)


def test_constants_are_no_residuals():
    table = jnp.arange(n * 1.0)
    halves = divided(lambda x: (jnp.cumsum(x * table), jnp.sort(table + 2.0)), x)
    assert residuals(halves) == [] and halves.reads == (False,)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("unroll", [1, 2, True])
def test_a_scan_becomes_two_that_stack_their_residuals(reverse: bool, unroll: Any):
    """As a backward through layers: a cotangent goes from turn to turn, and a shared sum."""

    def f(x, ws, hs):
        def turn(carry, of_turn):
            x, shared, count = carry
            w, h = of_turn
            g = jnp.tanh(w @ x)
            return (g, shared + jnp.outer(h, h), count + 1), jnp.outer(h, x)

        init = x, jnp.zeros((n, n)), 0
        (x, shared, _), stacked = lax.scan(turn, init, (ws, hs), reverse=reverse, unroll=unroll)
        return x, shared, stacked

    arguments = x, jnp.stack([matrix] * 3), jnp.stack([x, y, x])
    halves = divided(f, *arguments, first=(True, False, False))
    assert residuals(halves) == [((3, n), "float32")]  # x of each turn
    assert halves.reads == (False, False, True)
    (one,), (two,) = (
        [eqn.operation for eqn in half.eqns if isinstance(eqn.operation, Scan)]
        for half in (halves.first, halves.second)
    )
    assert (one.num_carry, two.num_carry) == (1, 1)
    for loop in (one, two):
        assert loop.reverse == reverse and loop.unroll == (3 if unroll is True else unroll)


def test_what_a_scan_returns_in_any_case_is_no_residual():
    def f(x):
        def turn(x, _):
            x = jnp.cumsum(x)
            return x, x

        last, all_of_them = lax.scan(turn, x, length=3)
        return last, jnp.sort(all_of_them)

    halves = divided(f, x)
    assert residuals(halves) == [((3, n), "float32")] and names(halves.second) == ["sort"]


def test_loops_in_loops_are_divided():
    def f(x, ws):
        def turn(x, w):
            return jnp.cumsum(x), jnp.outer(jnp.sin(x), w)

        def outer(x, ws):
            return lax.scan(turn, x, ws)

        return lax.scan(outer, x, ws)

    halves = divided(f, x, jnp.ones((2, 3, n)))
    assert residuals(halves) == [((2, 3, n), "float32")]
    assert names(halves.first) == ["cumsum"] and "cumsum" not in names(halves.second)


def test_branches_share_residuals_of_one_type_and_return_zeros_where_they_have_none():
    def f(i, x):
        def one(x):
            a = jnp.cumsum(x)
            return jnp.cumsum(a), jnp.sort(a)

        def two(x):
            a, b = jnp.cumsum(x), lax.cumprod(x)
            return jnp.cumsum(a * b), jnp.sort(a) + jnp.sort(b)

        def none(x):
            return x, x

        return lax.switch(i, (one, two, none), x)

    for i in range(3):
        halves = divided(f, jnp.int32(i), x)
        assert residuals(halves) == [((n,), "float32"), ((n,), "float32")]
        assert set(names(halves.second)) & {"cumsum", "cumprod"} == set()


def test_a_choice_that_has_nothing_left_for_later_is_not_asked_for_its_index_again():
    def f(i, x):
        a, b = lax.cond(i > 0, lambda x: (jnp.cumsum(x),) * 2, lambda x: (x, x), x)
        return jnp.cumsum(a), jnp.sort(b)

    halves = divided(f, jnp.int32(1), x)
    assert residuals(halves) == [((n,), "float32")] and halves.reads == (False, False)
    assert names(halves.second) == ["sort"]


def test_a_while_loop_stays_whole():
    def f(x):
        a, b = lax.fori_loop(0, jnp.int32(x[0]), lambda _, c: (c[0] * 2, c[1] + 1), (x, x))
        return jnp.cumsum(a), jnp.sort(b)

    halves = divided(f, x)
    assert "while" in names(halves.first) and names(halves.second) == ["sort"]
    assert residuals(halves) == [((n,), "float32")]


def test_calls_are_divided_and_those_with_shardings_are_not():
    def f(x):
        return jnp.cumsum(x), jnp.sort(x)

    assert names(divided(jax.jit(f), x).second) == ["sort"]
    assert names(divided(jax.checkpoint(f), x).second) == ["sort"]
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert names(divided(jax.jit(f, out_shardings=device), x).second) == []


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_shard_map_becomes_two_with_residuals_by_device(check_vma: bool):
    mesh = sharding.make_mesh({"data": 2, "tensor": 2}, devices=jax.devices()[:4])

    def local(w, x):
        a = jnp.cumsum(x)  # of a shard
        b = jnp.cumsum(w)  # the same on all
        return jnp.cumsum(a * b), jnp.sort(a) + jnp.sort(b)

    spec = PartitionSpec("data")
    f = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(), spec),
        out_specs=(spec, spec),
        check_vma=check_vma,
    )
    halves = divided(f, x[:2], x)
    if check_vma:
        assert residuals(halves) == [((2, 2), "float32"), ((1, 2), "float32")]
    else:
        assert residuals(halves) == [((4, 2), "float32"), ((4, 2), "float32")]
    assert "cumsum" not in names(halves.second)


def test_a_rule_for_vmap_survives_the_division():
    @jax.custom_batching.custom_vmap
    def pair(x):
        return jnp.cumsum(x), jnp.sort(x)

    @pair.def_vmap
    def rule(size, is_mapped, x):
        return (jnp.cumsum(x, axis=1) + 100, jnp.sort(x, axis=1) + 100), (True, True)

    halves = partition(to_graph(jax.make_jaxpr(lambda x: pair(x))(x)), (True, False), ("saved",))
    assert residuals(halves) == [] and halves.reads == (True,)
    (now,) = jax.vmap(halves.first.__call__)(x[None])
    (later,) = jax.vmap(halves.second.__call__)(x[None])
    assert_equal([now[0], later[0]], [jnp.cumsum(x) + 100, jnp.sort(x) + 100])


@st.composite
def recipes(draw: st.DrawFn) -> tuple[dict[int, list[int]], dict[int, int], list[int]]:
    """What each of a few values can be computed from, what they cost, and which are needed."""
    size = draw(st.integers(2, 7))
    parents = {
        value: sorted(draw(st.sets(st.integers(0, value - 1), min_size=1, max_size=3)))
        for value in range(1, size)
        if draw(st.booleans())
    }
    costs = {value: draw(st.integers(1, 9)) for value in range(size)}
    needs = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=3, unique=True))
    return parents, costs, needs


@given(recipes())
def test_what_is_kept_is_enough_and_nothing_cheaper_is(recipe: Any):
    parents, costs, needs = recipe

    def is_enough(kept: Sequence[int]) -> bool:
        known = set(kept)
        for value in range(len(costs)):
            if value in parents and known.issuperset(parents[value]):
                known.add(value)
        return known.issuperset(needs)

    kept = minimal_cut(needs, parents, costs.__getitem__)
    every = itertools.chain(*(itertools.combinations(costs, k) for k in range(len(costs) + 1)))
    least = min(sum(costs[v] for v in some) for some in every if is_enough(some))
    assert is_enough(kept) and sum(costs[v] for v in kept) == least
