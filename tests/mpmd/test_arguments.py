"""How a compiled function is called: names, static arguments, types, trees, memory."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.mpmd import (
    MpmdArray,
    MpmdSharding,
    mark_stage_end,
    mpmd_jit_by_yield,
    mpmd_jit_with_loop,
)
from jaxpipe.mpmd.jaxpp import Std1F1B, ZeroBubble
from mpmd.small import (
    assert_close,
    assert_equal,
    batch,
    gradients,
    groups,
    layer,
    layers,
    marked_loss,
    squared_error,
)


def scaled(weights: Any, xs: Any, ys: Any, *, scale: Any = 1.0, kind: str = "tanh") -> Any:
    def loss(weights: Any, x: Any, y: Any) -> Any:
        for w in weights:
            x = mark_stage_end({"tanh": jnp.tanh, "sin": jnp.sin}[kind](layer(w, x)))
        return squared_error(x, y) * scale

    return gradients(Std1F1B(2), loss)(weights, xs, ys)


def test_arguments_may_be_given_by_name():
    """Static ones too, which give another program, and those of a compiled step."""
    (xs, ys), weights = batch(3), layers(2)
    step = mpmd_jit_with_loop(scaled, groups(2), static_argnames="kind")
    for kwargs in ({"scale": 2.0}, {"scale": 2.0, "kind": "sin"}, {}):
        true = jax.jit(scaled, static_argnames="kind")(weights, xs, ys, **kwargs)
        assert_close(step(weights, ys=ys, xs=xs, **kwargs), true)
    compiled = step.compile(weights, xs, ys=ys, scale=2.0, kind="sin")
    assert_close(
        compiled(weights, xs, ys=ys, scale=3.0, kind="sin"),
        jax.jit(scaled, static_argnames="kind")(weights, xs, ys, scale=3.0, kind="sin"),
    )
    args, kwargs = compiled.in_shardings
    assert [w["in"].mesh_ids for w in args[0]] == [{0}, {1}] and args[1].mesh_ids == {0}
    assert {name: x.mesh_ids for name, x in kwargs.items()} == {"scale": {1}, "ys": {1}}


def test_a_static_argument_is_static_by_place_and_by_name():
    """Whichever of the two is said, as with `jax.jit`."""
    step = mpmd_jit_with_loop(lambda x, n: x * n.bit_length(), groups(1), static_argnums=1)
    assert float(step(jnp.float32(3), 4)) == float(step(jnp.float32(3), n=5)) == 9
    step = mpmd_jit_with_loop(lambda n, x: x * n.bit_length(), groups(1), static_argnames="n")
    assert float(step(4, jnp.float32(3))) == 9
    with pytest.raises(
        ValueError, match=r"The static arguments \(\[1\],\) are not hashable\. Give"
    ):
        step([1], jnp.float32(3))


def test_static_arguments_that_are_equal_and_of_another_type_have_another_program():
    """1, 1.0 and True are equal, and a function may return something else for each."""
    factors = {int: np.int32(1), float: np.float32(1), bool: np.int32(7)}

    def scale(x: Any, n: Any) -> Any:
        return x.astype(factors[type(n)].dtype) * factors[type(n)]

    step, x = mpmd_jit_with_loop(scale, groups(1), static_argnums=1), jnp.arange(3)
    found = [step(x, n) for n in (1, 1.0, True)]
    assert [x.dtype for x in found] == [np.int32, np.float32, np.int32]
    assert_equal(found[2], 7 * np.arange(3, dtype=np.int32))


def test_a_negative_static_index_counts_from_the_end_of_a_call():
    def scale(x: Any, *args: Any) -> Any:
        return x * args[0] * len(args[-1])

    step = mpmd_jit_with_loop(scale, groups(1), static_argnums=-1)
    assert float(step(jnp.float32(3), jnp.float32(2), "ab")) == 12
    assert float(step(jnp.float32(3), jnp.float32(2), jnp.float32(2), "abc")) == 18


def test_settings_of_jax_that_change_a_trace_give_another_program():
    step = mpmd_jit_with_loop(lambda x: jnp.sum(x.astype(float) / 3), groups(1))
    x = np.arange(3, dtype=np.int32)
    assert step(x).dtype == np.float32
    with jax.enable_x64(True):
        assert step(x).dtype == np.float64
    draw = mpmd_jit_with_loop(lambda key: jax.random.uniform(key, (2,)), groups(1))
    key = jax.random.key(0)
    found = [draw(key)]
    with jax.threefry_partitionable(not jax.config.values["jax_threefry_partitionable"]):
        found.append(draw(key))
        assert_equal(found[1], jax.jit(lambda key: jax.random.uniform(key, (2,)))(key))
    assert not np.array_equal(np.asarray(found[0]), np.asarray(found[1]))


WRONG_NAMES = {
    r"donate_argnums=\(7,\), but only accepts 2 positional": {"donate_argnums": 7},
    r"static_argnums=\(2,\), but only accepts 2 positional": {"static_argnums": (2,)},
    r"invalid argnames \{'z'\} in donate_argnames": {"donate_argnames": "z"},
    r"invalid argnames \{'z'\} in static_argnames": {"static_argnames": ("z",)},
    r"appear in both": {"static_argnums": 0, "donate_argnames": "x"},
}


@pytest.mark.parametrize("message", WRONG_NAMES)
def test_arguments_that_a_function_does_not_have_are_refused_as_jit_does(message: str):
    for function in (mpmd_jit_with_loop, mpmd_jit_by_yield):
        with pytest.raises(ValueError, match=message):
            function(lambda x, y: x, groups(1), **WRONG_NAMES[message])


# Types.


def test_a_train_state_compiles_once(caplog):
    """Its step is a Python number at first and an array afterwards, weak as with `jax.jit`."""

    def step(state: Any, xs: Any, ys: Any) -> Any:
        value, grads = gradients(Std1F1B(2))(state.params, xs, ys)
        return state.apply_gradients(grads=grads), value * 0.9**state.step

    with jax.numpy_dtype_promotion("standard"):
        state: Any = TrainState.create(apply_fn=None, params=layers(2), tx=optax.adam(1e-2))
        first = state.step
        assert first == 0 and not hasattr(first, "dtype")
        pipelined, plain, true = mpmd_jit_with_loop(step, groups(2)), jax.jit(step), state
        for _ in range(3):
            (state, value), (true, true_value) = pipelined(state, *batch(3)), plain(true, *batch(3))
            assert_close((state.params, value), (true.params, true_value))
    assert len(pipelined._compiled) == 1
    assert not [r for r in caplog.records if "compiled once more" in r.message]
    assert state.step.weak_type and int(state.step) == 3


def test_python_and_numpy_numbers_have_one_program_for_each_type():
    def step(x: Any, scale: Any) -> Any:
        return x * scale, scale + 1

    pipelined, plain = mpmd_jit_with_loop(step, groups(1)), jax.jit(step)
    x = jnp.ones(3, jnp.bfloat16)
    for scale in (2, 3, np.int32(2), 2.0, 3.0, True, False):
        with jax.numpy_dtype_promotion("standard"):
            (y, z), (true_y, true_z) = pipelined(x, scale), plain(x, scale)
        assert (y.dtype, z.dtype, z.weak_type) == (true_y.dtype, true_z.dtype, true_z.weak_type)
        np.testing.assert_array_equal(y, true_y)
    assert len(pipelined._compiled) == 4


# Trees.


def test_wrong_trees_are_named_and_never_shown():
    """A state has millions of numbers, and an error says where it differs in a line."""
    weights, data = layers(2), batch(3)
    step = mpmd_jit_with_loop(gradients(Std1F1B(2)), groups(2))
    compiled = step.compile(weights, *data)
    other = [weights[0], {"in": weights[1]["in"], "bias": jnp.ones(1000)}]
    specs = [{"in": P(), "out": P()}] * 2
    jitted = partial(mpmd_jit_with_loop, gradients(Std1F1B(2)), groups(2))
    other_specs = [specs[0], {"in": P(), "bias": P()}]
    cases = [
        (
            r"they lack `args\[0\]\[1\]\['out'\]` and they have in addition "
            r"`args\[0\]\[1\]\['bias'\]`",
            lambda: compiled(other, *data),
        ),
        (r"they lack `args\[2\]`", lambda: compiled(weights, data[0])),
        (r"they have in addition `more\['x'\]`", lambda: compiled(weights, *data, more={"x": 1})),
        ("their containers differ", lambda: compiled(tuple(weights), *data)),
        (
            r"`in_specs\[0\]\[1\]` is a dict of 2 \(\['bias'\], \['in'\]\), and the value that it",
            lambda: jitted(in_specs=(other_specs, P(), P()))(weights, *data),
        ),
        (
            r"`out_shardings\[1\]` is a list of 3 .*, and the value that it describes is a list "
            r"of 2",
            lambda: jitted(out_shardings=(P(), [P()] * 3))(weights, *data),
        ),
        (
            r"`in_specs\[1\]` is a str, which is not a spec .* one array, float32\[3, 2, 8\]",
            lambda: jitted(in_specs=(P(), "fsdp", P()))(weights, *data),
        ),
    ]
    for message, run in cases:
        with pytest.raises(ValueError, match=message) as caught:
            run()
        assert len(str(caught.value)) < 700 and "Array(" not in str(caught.value)


def test_arguments_of_another_type_are_named_before_anything_runs():
    """What is donated is still there afterwards."""

    def step(weights: Any, xs: Any, *, scale: Any) -> Any:
        return jax.tree.map(lambda w: w * scale, weights), jnp.sum(xs)

    weights, xs = layers(2), jnp.ones(3)
    compiled = mpmd_jit_with_loop(step, groups(2), donate_argnums=0).compile(weights, xs, scale=1.0)
    cases = [
        (r"`args\[1\]` is float32\[4\], .* for float32\[3\]", weights, jnp.ones(4), 1.0),
        (r"`args\[1\]` is int32\[3\], .* for float32\[3\]", weights, np.ones(3, int), 1.0),
        (r"`scale` is int32\[\], .* for float32\[\]", weights, xs, 1),
        (
            r"`args\[0\]\[1\]\['in'\]` is float32\[\], .* for float32\[8, 16\]",
            [weights[0], weights[1] | {"in": 1.0}],
            xs,
            1.0,
        ),
    ]
    for message, *args, scale in cases:
        with pytest.raises(ValueError, match=message):
            compiled(*args, scale=scale)
    new, _ = compiled(weights, np.ones(3), scale=np.float64(2))
    assert_close(new[0]["in"], 2 * layers(1)[0]["in"])


# Meshes and memory.


def test_a_call_inside_set_mesh_of_all_groups():
    """Tracing sees the mesh of a group, and the caller's mesh is there again afterwards."""
    mesh, args = groups(2, fsdp=2), (layers(2), *batch(3))
    true = jax.jit(gradients(Std1F1B(2)))(*args)
    with jax.set_mesh(mesh.jax_mesh):
        step = mpmd_jit_with_loop(gradients(Std1F1B(2)), mesh)
        assert_close(step(*args), true)
        assert_close(step.compile(*args)(*args), true)
        assert jax.sharding.get_abstract_mesh() == mesh.jax_mesh.abstract_mesh
    with mesh as same:
        assert same is mesh
        assert_close(step(*args), true)


@pytest.mark.parametrize("context", ["nothing", "set_mesh", "mpmd_mesh"])
def test_constraints_that_name_the_mesh_of_all_groups(context: str):
    """Within a stage they hold on its group."""
    mesh = groups(2, fsdp=2)

    def stage(w: Any, x: Any) -> Any:
        rows = NamedSharding(mesh.jax_mesh, P("fsdp"))
        return lax.with_sharding_constraint(layer(w, lax.with_sharding_constraint(x, rows)), rows)

    def loss(weights: Any, x: Any, y: Any) -> Any:
        return marked_loss(weights, x, y, stage=jax.checkpoint(stage))

    args = layers(2), *batch(3)
    around = {"set_mesh": lambda: jax.set_mesh(mesh.jax_mesh), "mpmd_mesh": lambda: mesh}
    with around[context]() if context in around else jax.numpy_dtype_promotion("strict"):
        found = mpmd_jit_with_loop(gradients(Std1F1B(2), loss), mesh)(*args)
    assert_close(found, jax.jit(gradients(Std1F1B(2)))(*args))


@pytest.mark.parametrize("schedule", [Std1F1B(2), ZeroBubble(2)], ids=lambda s: type(s).__name__)
def test_constraints_on_the_mesh_of_all_groups_inside_of_a_scan(schedule: Any):
    """What a stage hands on has a sharding that only the compiler knows."""
    mesh = groups(2, fsdp=2)

    def stage(w: Any, x: Any) -> Any:
        rows = NamedSharding(mesh.jax_mesh, P("fsdp"))

        def turn(x: Any, _: Any) -> tuple[Any, None]:
            return lax.with_sharding_constraint(layer(w, x), rows), None

        return 2 * lax.scan(turn, x, None, length=2)[0]

    def plain(w: Any, x: Any) -> Any:
        return 2 * layer(w, layer(w, x))

    args = layers(2), *batch(3)
    losses = [partial(marked_loss, stage=f) for f in (stage, plain)]
    found = mpmd_jit_with_loop(gradients(schedule, losses[0]), mesh)(*args)
    assert_close(found, jax.jit(gradients(schedule, losses[1]))(*args))


def test_another_memory_kind_is_refused_by_name():
    mesh, x = groups(2), jnp.ones(4)
    host = NamedSharding(mesh.jax_mesh, P(), memory_kind="pinned_host")
    for side in ("in", "out"):
        with pytest.raises(
            ValueError, match=rf"`{side}_shardings.*` has memory_kind='pinned_host'\. .* 'device'"
        ):
            shardings: Any = [host] if side == "out" else ([host],)
            partial(mpmd_jit_with_loop, **{f"{side}_shardings": shardings})(list, mesh)([x])
    with pytest.raises(ValueError, match=r"`MpmdSharding` has memory_kind='pinned_host'"):
        MpmdSharding(mesh, {0}, P(), "pinned_host")

    def step(xs: Any) -> Any:
        return lax.with_sharding_constraint(xs * 2, host)

    with pytest.raises(ValueError, match="`with_sharding_constraint` inside a stage has memory_k"):
        mpmd_jit_with_loop(step, mesh)(x)
    device = NamedSharding(mesh.jax_mesh, P(), memory_kind="device")
    np.testing.assert_array_equal(
        mpmd_jit_with_loop(jnp.sin, mesh, in_shardings=(device,))(x), jnp.sin(x)
    )


def test_compiler_options_reach_xla():
    step = partial(mpmd_jit_with_loop, jnp.sin, groups(1))
    options = {"xla_cpu_enable_fast_math": True}
    np.testing.assert_allclose(step(compiler_options=options)(1.0), np.sin(1.0), rtol=1e-6)
    with pytest.raises(Exception, match="No such compile option: 'xla_no_such_option'"):
        step(compiler_options={"xla_no_such_option": 1})(1.0)


@pytest.mark.parametrize("stages", [2, 4])
def test_by_yield_runs_stages_round_and_round(stages: int):
    def step(weights: Any, x: Any, *, y: Any) -> Any:
        return jax.value_and_grad(marked_loss)(weights, x, y)

    x, y = (x[0] for x in batch(1))
    pipelined = mpmd_jit_by_yield(step, groups(2), target_num_stages=stages)
    value, grads = pipelined(layers(stages), x, y=y)
    assert_close((value, grads), jax.jit(step)(layers(stages), x, y=y))
    assert isinstance(value, MpmdArray)
    assert [g["in"].mpmd_idxs for g in grads] == [(i % 2,) for i in range(stages)]
    with pytest.raises(ValueError, match=r"`target_num_stages` is 3, and the mesh has 2 groups"):
        mpmd_jit_by_yield(step, groups(2), target_num_stages=3)
