"""Programs whose collectives can be counted by hand, compiled for eight CPU devices."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxpipe.xla import audit, totals, uncounted_loops
from jaxpipe.xla.hlo import Audit

D = 8
RING = [(i, (i + 1) % D) for i in range(D)]
SHAPE, SHARD_BYTES = (8 * D, 16), 8 * 16 * 4


def permute(x):
    return lax.ppermute(jnp.sin(x), "x", RING)


def reduce(x):
    return lax.psum(jnp.sin(x), "x")


def gather_and_scatter(x):
    whole = lax.all_gather(jnp.sin(x), "x", tiled=True)
    return lax.psum_scatter(jnp.cos(whole), "x", tiled=True)


def exchange(x):
    return lax.all_to_all(jnp.sin(x), "x", 0, 0, tiled=True)


def audited(f, *extra, dtype=jnp.float32) -> Audit:
    """The audit of `f`, seen by one of the eight devices."""
    mesh = jax.make_mesh((D,), ("x",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("x")
    specs = (spec, *(PartitionSpec() for _ in extra))
    sharded = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)
    arguments = (jax.ShapeDtypeStruct(SHAPE, dtype), *extra)
    return audit(str(jax.jit(sharded).lower(*arguments).compile().as_text()))


def counts(of: Audit) -> dict[str, tuple[int, int]]:
    """(executions, bytes of all of them) by kind."""
    return {kind: (sums.executions, sums.result_bytes) for kind, sums in totals(of).items()}


def times(f, length: int):
    return lambda x: lax.scan(lambda x, _: (f(x), ()), x, None, length=length)[0]


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (permute, {"collective-permute": (1, SHARD_BYTES)}),
        (reduce, {"all-reduce": (1, SHARD_BYTES)}),
        (exchange, {"all-to-all": (1, SHARD_BYTES)}),
        (
            gather_and_scatter,
            {"all-gather": (1, D * SHARD_BYTES), "reduce-scatter": (1, SHARD_BYTES)},
        ),
    ],
)
def test_every_kind_counts_the_bytes_of_its_result(f, expected):
    assert counts(audited(f)) == expected


@pytest.mark.parametrize(("dtype", "size"), [(jnp.float32, 4), (jnp.int8, 1), (jnp.int16, 2)])
def test_bytes_follow_the_dtype(dtype, size):
    found = audited(lambda x: lax.ppermute(x + 1, "x", RING), dtype=dtype)
    assert counts(found) == {"collective-permute": (1, 8 * 16 * size)}


def test_a_scan_multiplies():
    found = audited(times(permute, 7))
    assert counts(found) == {"collective-permute": (7, 7 * SHARD_BYTES)}
    (loop,), (site,) = found.loops, found.sites
    assert (loop.trips, loop.loops, site.loops) == (7, (), (loop.name,))
    assert "ppermute" in site.op_name
    assert site.groups.startswith("{{0,1},{1,2}")
    assert site.shape == "f32[8,16]"
    assert not site.asynchronous


def test_nested_scans_multiply():
    def body(x):
        return times(permute, 5)(reduce(x))

    found = audited(times(body, 3))
    assert counts(found) == {
        "all-reduce": (3, 3 * SHARD_BYTES),
        "collective-permute": (15, 15 * SHARD_BYTES),
    }
    assert [(loop.trips, len(loop.loops)) for loop in found.loops] == [(3, 0), (5, 1)]


@pytest.mark.parametrize(("start", "stop", "step", "trips"), [(3, 20, 1, 17), (1, 10, 2, 5)])
def test_loops_need_not_count_from_zero_by_one(start, stop, step, trips):
    def f(x):
        first = (jnp.int32(start), x)
        return lax.while_loop(lambda s: s[0] < stop, lambda s: (s[0] + step, permute(s[1])), first)[
            1
        ]

    assert counts(audited(f))["collective-permute"][0] == trips


def test_a_loop_of_unknown_length_is_named():
    n = jax.ShapeDtypeStruct((), jnp.int32)
    found = audited(lambda x, n: lax.fori_loop(0, n, lambda _, x: permute(x), x), n)
    assert [loop.trips for loop in found.loops] == [None]
    assert uncounted_loops(found) == (found.loops[0].name,)
    assert counts(found)["collective-permute"][0] == 1


def test_an_unknown_length_does_not_matter_where_nothing_is_communicated():
    n = jax.ShapeDtypeStruct((), jnp.int32)
    found = audited(lambda x, n: permute(lax.fori_loop(0, n, lambda _, x: jnp.sin(x), x)), n)
    assert uncounted_loops(found) == ()


def test_of_a_conditional_the_branch_that_moves_most_counts():
    n = jax.ShapeDtypeStruct((), jnp.int32)

    def f(x, n):
        return lax.switch(n, [permute, gather_and_scatter, lambda x: permute(permute(x))], x)

    found = audited(f, n)
    assert set(counts(found)) == {"all-gather", "reduce-scatter"}
    assert all(site.conditional for site in found.sites)


def test_a_branch_counts_as_often_as_its_name_scope_says():
    def turn(x, t):
        with jax.named_scope("taken_3_of_6"):
            x = lax.cond(t % 2 == 0, times(permute, 5), jnp.cos, x)
        return x, ()

    found = audited(lambda x: lax.scan(turn, x, jnp.arange(6))[0])
    assert counts(found) == {"collective-permute": (15, 15 * SHARD_BYTES)}


def test_a_condition_that_is_a_loop_counts_as_often_as_its_name_scope_says():
    def turn(x, t):
        with jax.named_scope("taken_3_of_6"):
            once = lambda carry: (False, times(permute, 5)(carry[1]))  # noqa: E731
            _, x = lax.while_loop(lambda carry: carry[0], once, (t % 2 == 0, x))
        return x, ()

    found = audited(lambda x: lax.scan(turn, x, jnp.arange(6))[0])
    assert counts(found) == {"collective-permute": (15, 15 * SHARD_BYTES)}
    assert all(site.conditional for site in found.sites)
    assert uncounted_loops(found) == ()


def test_a_program_on_its_own_device_communicates_nothing():
    assert audited(jnp.sin) == Audit((), ())


@settings(max_examples=12)
@given(
    st.lists(st.sampled_from([permute, reduce, exchange, gather_and_scatter]), max_size=3),
    st.integers(1, 6),
    st.integers(1, 3),
)
def test_a_scan_of_n_is_n_times_its_body(operations, inner, outer):
    def body(x):
        for operation in operations:
            x = operation(x)
        return x

    once = counts(audited(body))
    repeated = counts(audited(times(times(body, inner), outer)))
    n = inner * outer
    assert repeated == {kind: (n * runs, n * size) for kind, (runs, size) in once.items()}


def test_the_text_must_be_hlo():
    with pytest.raises(ValueError, match=r"has no ENTRY computation.*compile\(\)\.as_text\(\)"):
        audit("module @jit_f {}")


@pytest.mark.parametrize("remat", [True, False])
def test_gradients_of_a_scan_over_sharded_layers_gather_each_layer_once_or_twice(remat):
    L = 4

    def loss(w, x):
        def layer(x, w):
            return jnp.tanh(x @ lax.all_gather(w, "x", tiled=True)), ()

        body = jax.checkpoint(layer) if remat else layer
        return lax.scan(body, x, w)[0].sum()

    mesh = jax.make_mesh((D,), ("x",), axis_types=(AxisType.Auto,))
    specs = (PartitionSpec(None, "x"), PartitionSpec("x"))
    f = jax.shard_map(
        jax.grad(loss), mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False
    )
    arguments = (
        jax.ShapeDtypeStruct((L, 32, 32), jnp.float32),
        jax.ShapeDtypeStruct((D, 32), jnp.float32),
    )
    found = counts(audit(str(jax.jit(f).lower(*arguments).compile().as_text())))
    gathers = 2 * L if remat else L
    assert found["all-gather"] == (gathers, gathers * 32 * 32 * 4)
    assert found["reduce-scatter"] == (L, L * 32 * 32 * 4 // D)
