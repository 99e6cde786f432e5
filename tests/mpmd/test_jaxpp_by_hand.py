"""Programs of tasks and transfers by hand, beside the same functions in one program of JAX's."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpipe.mpmd
from jaxpipe.mpmd.jaxpp.experimental import mpmd

from .processes import run_processes

WIDTH, ROWS, M = 8, 4, 3


def mesh_of(groups: int, fsdp: int = 1, kind: AxisType = AxisType.Auto) -> Any:
    devices = np.array(jax.devices()[: groups * fsdp]).reshape(groups, fsdp)
    return mpmd.MpmdMesh(Mesh(devices, ("stage", "fsdp"), axis_types=(kind,) * 2), "stage")


def forward(w, x):
    return jnp.tanh(x @ w)


def backward(w, x, dy):
    return jax.vjp(forward, w, x)[1](dy)


def reference(weights, xs):
    loss = lambda weights, x: 0.5 * jnp.sum(forward(weights[1], forward(weights[0], x)) ** 2)  # noqa: E731
    total = lambda weights: sum(loss(weights, x) for x in xs)  # noqa: E731
    return jax.jit(jax.value_and_grad(total))(weights)


def data() -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), 2 + M)
    return [jax.random.normal(k, (WIDTH, WIDTH)) / 3 for k in keys[:2]], [
        jax.random.normal(k, (ROWS, WIDTH)) for k in keys[2:]
    ]


def one_f_one_b(mesh: Any, spec: P, rows: P, infer_donation: bool = True) -> Any:
    """Two stages: forwards are sent on, and both sum gradients over the microbatches."""
    w0, w1 = (NamedSharding(m, spec) for m in mesh.unstack)
    x0, x1 = (NamedSharding(m, rows) for m in mesh.unstack)
    one = NamedSharding(mesh.unstack[1], P())

    def last(total, gradient, w, x):
        y = forward(w, x)
        dw, dx = backward(w, x, y)
        return total + 0.5 * jnp.sum(y**2), gradient + dw, dx

    def first(gradient, w, x, dy):
        return gradient + backward(w, x, dy)[0]

    @mpmd.mpmd(mesh, in_shardings=((w0, w1), x0), infer_donation=infer_donation)
    def step(weights, xs):
        zeros = lambda sharding: mpmd.task(jnp.zeros_like, out_shardings=sharding)  # noqa: E731
        grad0, grad1 = zeros(w0)(weights[0]), zeros(w1)(weights[1])
        total = mpmd.task(lambda w: jnp.zeros(()), out_shardings=one)(weights[1])
        for x in xs:
            h = mpmd.task(forward, name="forward", out_shardings=x0)(weights[0], x)
            h = mpmd.transfer(h, out_shardings=x1).done()
            run = mpmd.task(last, out_shardings=(one, w1, x1))
            total, grad1, dh = run(total, grad1, weights[1], h)
            dh = mpmd.transfer(dh, out_shardings=x0).done()
            grad0 = mpmd.task(first, out_shardings=w0)(grad0, weights[0], x, dh)
        return total, [grad0, grad1]

    return step


@pytest.mark.parametrize(("fsdp", "donates"), [(1, True), (2, False)])
def test_two_stages_by_hand_have_the_gradients_of_one_program(fsdp, donates):
    mesh = mesh_of(2, fsdp)
    spec, rows = P("fsdp"), P("fsdp")
    step = one_f_one_b(mesh, spec, rows, donates)
    weights, xs = data()
    placed = tuple(
        jax.device_put(w, NamedSharding(m, spec))
        for w, m in zip(weights, mesh.unstack, strict=True)
    )
    in_group = [jax.device_put(x, NamedSharding(mesh.unstack[0], rows)) for x in xs]
    lowered = step.lower(placed, in_group)
    for run in (lowered, step, step):
        value, gradients = run(placed, in_group)
        wanted = reference(weights, xs)
        np.testing.assert_allclose(value, wanted[0], rtol=1e-5)
        for g, true, m in zip(gradients, wanted[1], mesh.unstack, strict=True):
            np.testing.assert_allclose(g, true, rtol=1e-5, atol=1e-6)
            assert g.sharding == NamedSharding(m, spec)
    assert jax.tree.leaves(lowered.used_inputs) == [True] * (2 + M)
    assert lowered.out_shape[0].shape == () and lowered.out_shardings[1][0].spec == spec


def test_explicit_axes_delay_the_sum_of_gradients():
    """As in JaxPP's example: reduced weights, unreduced sums, one reduce-scatter at the end."""
    mesh = mesh_of(2, 2, AxisType.Explicit)
    group = mesh.unstack[0]
    assert group.axis_types == (AxisType.Explicit,) * 2
    stored, whole = (
        NamedSharding(group, P("fsdp")),
        NamedSharding(group, P(reduced=frozenset({"fsdp"}))),
    )
    rows = NamedSharding(group, P("fsdp"))
    partial_sum = NamedSharding(group, P(unreduced=frozenset({"fsdp"})))

    def gathered(w):
        return jax.reshard(w, whole)

    def add(total, w, x):
        product = lambda w: jnp.einsum("bd,dh->bh", x, w, out_sharding=P("fsdp", None))  # noqa: E731
        y, pull = jax.vjp(lambda w: jnp.tanh(product(w)), w)
        return total + pull(y)[0]

    def zeros(w):
        return jnp.zeros_like(w, out_sharding=P(unreduced=frozenset({"fsdp"})))

    @mpmd.mpmd(mesh, in_shardings=(stored, rows))
    def step(w, xs):
        total = mpmd.task(zeros, out_shardings=partial_sum)(w)
        w = mpmd.task(gathered, out_shardings=whole)(w)
        for x in xs:
            total = mpmd.task(add, out_shardings=partial_sum)(total, w, x)
        return mpmd.task(lambda g: jax.reshard(g, stored), out_shardings=stored)(total)

    weights, xs = data()
    with jax.set_mesh(group):
        placed = jax.device_put(weights[0], stored), [jax.device_put(x, rows) for x in xs]
    gradient = step(*placed)
    true = jax.grad(lambda w: sum(0.5 * jnp.sum(forward(w, x) ** 2) for x in xs))(weights[0])
    np.testing.assert_allclose(gradient, true, rtol=1e-5, atol=1e-6)
    assert gradient.sharding == stored


def test_stack_and_slice_take_arrays_together_and_apart():
    mesh = mesh_of(4, 2)
    shardings = [NamedSharding(m, P("fsdp")) for m in mesh.unstack]
    xs = [jnp.arange(8.0).reshape(4, 2) + 10 * i for i in range(4)]

    @mpmd.mpmd(mesh, in_shardings=tuple(shardings))
    def together(*xs):
        pairs = mpmd.stack(*xs[:2]), mpmd.stack(*xs[2:])
        every = mpmd.stack(*pairs)
        return every, mpmd.slice(every, [0, (1, 2), 3]), mpmd.slice(pairs[0], [(0,), (1,)])

    arguments = [jax.device_put(x, s) for x, s in zip(xs, shardings, strict=True)]
    every, parts, halves = together(*arguments)
    np.testing.assert_array_equal(every, np.stack(xs))
    assert every.sharding.spec == P("stage", "fsdp") and every.sharding.mesh == mesh.jax_mesh
    for part, wanted in zip(
        (*parts, *halves), (xs[:1], xs[1:3], xs[3:], xs[:1], xs[1:2]), strict=True
    ):
        np.testing.assert_array_equal(part, np.stack(wanted))
    assert parts[1].sharding.mesh == mesh.mpmd_submesh((1, 2)).jax_mesh


def test_a_task_of_several_groups_is_one_program():
    mesh = mesh_of(2, 2)
    both = NamedSharding(mesh.jax_mesh, P("stage"))
    apart = [NamedSharding(m, P()) for m in mesh.unstack]

    @mpmd.mpmd(mesh, in_shardings=tuple(apart))
    def mean(a, b):
        stacked = mpmd.stack(a, b)
        run = mpmd.task(lambda x: x - jnp.mean(x, 0), out_shardings=both)
        return mpmd.slice(run(stacked), [0, 1])

    x = jnp.arange(4.0)
    a, b = mean(*[jax.device_put(f * x, s) for f, s in zip((1, 3), apart, strict=True)])
    np.testing.assert_allclose(a[0], -x)
    np.testing.assert_allclose(b[0], x)


def test_what_cannot_run_is_refused_when_it_is_recorded():
    mesh = mesh_of(2, 2)
    first, second = (NamedSharding(m, P()) for m in mesh.unstack)
    x = jax.device_put(jnp.ones(4), first)
    double = mpmd.task(lambda x: 2 * x, name="double", out_shardings=first)

    def record(fun, *arguments):
        return mpmd.mpmd(mesh, in_shardings=(first,) * len(arguments))(fun)(*arguments)

    with pytest.raises(ValueError, match="outside of a function that `mpmd` decorates"):
        double(x)
    with pytest.raises(TypeError, match="Argument 0 of task `double` is a ArrayImpl"):
        record(lambda _: double(x), x)
    with pytest.raises(TypeError, match="MpmdValue"):
        record(lambda x: jnp.sin(x), x)
    with pytest.raises(ValueError, match="`double` has arrays and shardings on 2 meshes"):
        record(lambda x: mpmd.task(lambda x: x, name="double", out_shardings=second)(x), x)
    with pytest.raises(NotImplementedError, match=r"array's P.*, and reshard in a task"):
        to = NamedSharding(mesh.unstack[1], P("fsdp"))
        record(lambda x: mpmd.transfer(x, out_shardings=to).done(), x)
    with pytest.raises(ValueError, match="`transfer` is given an array of"):
        record(lambda x: mpmd.transfer(x, out_shardings=first).done(), x)

    for to in (P(), None, 3):
        with pytest.raises(TypeError, match=r"`out_shardings` of `transfer` has .*Give a Named"):
            record(lambda x, to=to: mpmd.transfer(x, out_shardings=to).done(), x)
    with pytest.raises(TypeError, match="`in_shardings` of task `double` has 3"):
        run = mpmd.task(lambda x: x, name="double", in_shardings=3, out_shardings=first)
        record(run, x)
    with pytest.raises(ValueError, match=r"`in_shardings` of task `double` has .*fsdp"):
        run = mpmd.task(lambda x: x, name="double", in_shardings=P("fsdp"), out_shardings=first)
        record(run, x)

    def twice(x):
        future = mpmd.transfer(x, out_shardings=second)
        return future.done(), future.done()

    def donated(x):
        mpmd.transfer(x, out_shardings=second)
        return mpmd.task(lambda x: x, out_shardings=first, donate_argnums=0)(x)

    def used_again(x):
        y = mpmd.task(lambda x: 2 * x, name="double", out_shardings=first, donate_argnums=0)(x)
        return y, double(x)

    def part_used_again(x):
        (part,) = mpmd.slice(x, [0])
        y = mpmd.task(lambda x: 2 * x, name="double", out_shardings=first, donate_argnums=0)(x)
        return y, double(part)

    def returned(x):
        return (
            double(x),
            mpmd.task(lambda x: x, name="last", out_shardings=first, donate_argnums=0)(x),
            x,
        )

    with pytest.raises(ValueError, match="Argument 0 of task `double` was donated to `double`"):
        record(part_used_again, x)
    with pytest.raises(ValueError, match="Result 2 of the function was donated to `last`"):
        record(returned, x)
    with pytest.raises(RuntimeError, match="`done` of a transfer was called twice"):
        record(twice, x)
    with pytest.raises(ValueError, match="donates argument 0, which was sent"):
        record(donated, x)
    with pytest.raises(ValueError, match="Argument 0 of task `double` was donated to `double`"):
        record(used_again, x)
    with pytest.raises(TypeError, match="`out_shardings` of task `double` has None"):
        record(mpmd.task(lambda x: x, name="double", out_shardings=None), x)
    with pytest.raises(ValueError, match=r"`groups` is \[1\], and the array is on \(0,\)"):
        record(lambda x: mpmd.slice(x, [1]), x)
    with pytest.raises(ValueError, match="`stack` is given arrays"):
        record(lambda x: mpmd.stack(x, x), x)
    with pytest.raises(ValueError, match=r"Argument 0 has .* and `in_shardings`"):
        record(lambda x: double(x), jax.device_put(x, second))
    with pytest.raises(ValueError, match=r"Give a `jaxpipe\.mpmd\.MpmdMesh`"):
        jaxpipe.mpmd.mpmd_jit_with_loop(lambda x: x, mesh_of(2, 2, AxisType.Explicit))


def test_donated_arguments_are_deleted():
    mesh = mesh_of(2)
    first = NamedSharding(mesh.unstack[0], P())

    @mpmd.mpmd(mesh, in_shardings=(first, first), donate_argnums=0)
    def step(state, x):
        return mpmd.task(lambda s, x: s + x, out_shardings=first)(state, x)

    state, x = (jax.device_put(jnp.ones(4), first) for _ in range(2))
    np.testing.assert_array_equal(step(state, x), 2 * np.ones(4))
    assert state.is_deleted() and not x.is_deleted()


@pytest.mark.slow
def test_two_processes_run_the_tasks_of_their_groups():
    """Each checks its own part of the gradients against one program without groups."""
    script = Path(__file__).with_name("by_hand_script.py")
    first, second = run_processes(script, "", 2, seconds=120, devices=2)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "used [True, False, True]" in first.out
    assert "used [False, True, False]" in second.out


def test_the_shards_of_a_stack_compile_once():
    mesh = mesh_of(2)
    shardings = tuple(NamedSharding(m, P()) for m in mesh.unstack)
    together = mpmd.mpmd(mesh, in_shardings=shardings)(mpmd.stack)
    xs = [jax.device_put(jnp.arange(4.0), s) for s in shardings]
    together(*xs)
    with jax.no_tracing(True):
        np.testing.assert_array_equal(together(*xs), np.stack([np.arange(4.0)] * 2))


def test_a_spec_of_fewer_dims_is_the_same_spec():
    mesh = mesh_of(1, 2)
    first = NamedSharding(mesh.unstack[0], P("fsdp", None))
    run = mpmd.task(lambda x: 2 * x, in_shardings=P("fsdp"), out_shardings=P("fsdp"))
    x = jax.device_put(jnp.ones((4, 2)), first)
    np.testing.assert_array_equal(
        mpmd.mpmd(mesh, in_shardings=(first,))(run)(x), 2 * np.ones((4, 2))
    )


@pytest.mark.parametrize("infer_donation", [True, False])
def test_stack_and_slice_share_memory_that_no_task_may_reuse_while_it_is_read(infer_donation):
    """XLA:CPU reuses donated memory, so that a task that came too early would change `a`."""
    mesh = mesh_of(2)
    apart = [NamedSharding(m, P("stage")) for m in mesh.unstack]
    both = NamedSharding(mesh.jax_mesh, P("stage"))
    tasks = {s: mpmd.task(lambda x: x + 1, name="add", out_shardings=s) for s in (*apart, both)}

    @mpmd.mpmd(mesh, in_shardings=tuple(apart), infer_donation=infer_donation)
    def step(a, b):
        a, b = tasks[apart[0]](a), tasks[apart[1]](b)  # memory of the program's own
        total = tasks[both](mpmd.stack(a, b))
        after = tasks[apart[0]](a)
        first, second = mpmd.slice(total, [0, 1])
        return after, tasks[apart[0]](first), tasks[apart[1]](second), tasks[both](total)

    x = np.arange(4.0, dtype=np.float32)[None]
    arguments = [jax.device_put(f * x, s) for f, s in zip((1, 3), apart, strict=True)]
    results = step(*arguments)
    wanted = x + 2, x + 3, 3 * x + 3, np.concatenate([x + 3, 3 * x + 3])
    for y, true in zip(results, wanted, strict=True):
        np.testing.assert_array_equal(y, true)


@pytest.mark.parametrize("donates", [False, True])
def test_parts_of_a_slice_may_be_donated_one_by_one(donates):
    mesh = mesh_of(2)
    both = NamedSharding(mesh.jax_mesh, P("stage"))
    apart = [NamedSharding(m, P("stage")) for m in mesh.unstack]
    chosen = 0 if donates else None

    @mpmd.mpmd(mesh, in_shardings=(both,), donate_argnums=0)
    def step(x):
        parts = mpmd.slice(x, [0, 1])
        return [
            mpmd.task(lambda x: 2 * x, out_shardings=s, donate_argnums=chosen)(part)
            for part, s in zip(parts, apart, strict=True)
        ]

    x = jax.device_put(jnp.arange(8.0).reshape(2, 4), both)
    y = step(x)
    np.testing.assert_array_equal(np.concatenate(y), 2 * np.arange(8.0).reshape(2, 4))
    assert x.is_deleted()


def test_a_donated_argument_whose_memory_is_returned_is_not_deleted():
    mesh = mesh_of(2)
    both = NamedSharding(mesh.jax_mesh, P("stage"))

    @mpmd.mpmd(mesh, in_shardings=(both,), donate_argnums=0)
    def step(x):
        return mpmd.slice(x, [0, 1])

    x = jax.device_put(jnp.arange(8.0).reshape(2, 4), both)
    np.testing.assert_array_equal(np.concatenate(step(x)), np.arange(8.0).reshape(2, 4))
