"""A stage's backward, whole and in halves: the numbers of `jax.vjp`, and no product made twice."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxpipe import models, sharding
from jaxpipe.autodiff import remat_by_name
from jaxpipe.autodiff.backward import combine, floating, split_backward
from jaxpipe.autodiff.staged_model import index_leading
from jaxpipe.kernels import dot_product_attention
from jaxpipe.models.layers import routed_experts
from small_models import small_deepseek, small_llama, stack

L, b, T, D = 3, 2, 5, 16
TOLERANCE = 1e-5
KEY = jax.random.key(0)

recompute = partial(jax.checkpoint, prevent_cse=False)


@dataclasses.dataclass(frozen=True)
class Case:
    """A stage and what it is given."""

    stage: Callable
    weights: Any
    x: Any
    batch_inputs: Any = ()
    rng: Any = ()

    @property
    def arguments(self) -> tuple:
        return self.weights, self.x, self.batch_inputs, self.rng


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.fold_in(KEY, seed), shape)


def layers_of(tree: Any) -> Any:
    return models.initialize_layers(tree["layer"], KEY, (L,))


def token_side() -> dict[str, jax.Array]:
    ids = jnp.arange(b * T).reshape(b, T) % T
    ones = jnp.ones((b, T), jnp.int32)
    return {"positions": ids, "segment_ids": ones, "target_weights": jnp.full((b, T), 0.1)}


def keys() -> jax.Array:
    return jax.random.split(KEY, L)


def dense(wrap: Callable = lambda f: f) -> Case:
    """Three layers, written out."""

    def stage(w, x, batch_inputs, rng):
        for matrix in w["matrices"]:
            x = wrap(lambda m, x: jnp.tanh(x @ m))(matrix, x)
        return x * w["scale"]

    matrices = [normal(i, D, D) for i in range(L)]
    return Case(stage, {"matrices": matrices, "scale": normal(9, D)}, normal(7, b, T, D))


def mlp() -> Case:
    x = {"x": normal(1, b, T, D), "skip": normal(2, b, T, D)}
    batch_inputs = {"positions": normal(3, b, T)}
    _, stage, _ = models.mlp(dropout_rate=0.2)
    return Case(stage, layers_of(models.mlp_weights(D, 32, 8)), x, batch_inputs, keys())


def llama(
    wrap: Callable = lambda f: f,
    dtype: Any = jnp.float32,
    layer_remat: Callable = lambda f: f,
    scan_layers: bool = True,
) -> Case:
    config = small_llama(base_num_decoder_layers=L)
    _, layer, _ = models.llama(
        config,
        attention=dot_product_attention,
        constrain=sharding.no_constraint,
        dropout_rate=0.1,
        dtype=dtype,
    )
    stage = stack(layer_remat(layer), scan_layers)
    weights = layers_of(models.llama_weights(config, dtype))
    return Case(wrap(stage), weights, normal(1, b, T, D).astype(dtype), token_side(), keys())


def deepseek(
    wrap: Callable = lambda f: f, constrain: Any = sharding.no_constraint, **options: Any
) -> Case:
    config = small_deepseek(q_lora_rank=6, kv_lora_rank=7, v_head_dim=9)
    _, layer, _ = models.deepseek(
        config,
        attention=dot_product_attention,
        experts=routed_experts(sharding.DEFAULT_RULES),
        constrain=constrain,
        **options,
    )
    weights = layers_of(models.deepseek_weights(config))
    return Case(wrap(stack(layer)), weights, normal(1, b, T, D), token_side())


def with_jit() -> Case:
    return dense(jax.jit)


def with_custom_vjp() -> Case:
    """A product whose derivative is its own."""

    @jax.custom_vjp
    def product(x, m):
        return x @ m

    product.defvjp(
        lambda x, m: (x @ m, (x, m)),
        lambda saved, g: (g @ saved[1].T, jnp.einsum("bti,btj->ij", saved[0], g)),
    )

    def stage(w, x, batch_inputs, rng):
        return lax.scan(lambda x, m: (jax.nn.relu(product(x, m)), None), x, w)[0]

    return Case(stage, normal(1, L, D, D), normal(2, b, T, D))


def with_absent_layers(wrap: Callable = lambda f: f) -> Case:
    """Stages with fewer layers than others skip some. One shift is shared by all of them."""

    def layer(x, w, shift):
        return x + jnp.tanh(x * w["scale"] + shift) @ w["matrix"]

    def stage(w, x, batch_inputs, rng):
        def step(x, of_layer):
            w_layer, present = of_layer
            run = lambda x: wrap(layer)(x, w_layer, w["shift"])  # noqa: E731
            return lax.cond(present, run, lambda x: x, x), jnp.sum(x)

        x, losses = lax.scan(step, x, (w["layers"], batch_inputs["present"]))
        return x, {"loss": jnp.sum(losses)}

    layers = {"matrix": normal(1, L, D, D), "scale": normal(3, L, D)}
    batch_inputs = {"present": jnp.array([True, False, True])}
    weights = {"layers": layers, "shift": normal(4, D)}
    return Case(stage, weights, normal(2, b, T, D), batch_inputs)


def with_two_kinds_of_layers() -> Case:
    def narrow(x, w):
        return jnp.tanh(x @ w[0])

    def wide(x, w):
        return jnp.sin(x @ w[0]) @ w[1]

    def stage(w, x, batch_inputs, rng):
        step = lambda x, of: (lax.switch(of[1], [narrow, wide, lambda x, w: x], x, of[0]), None)  # noqa: E731
        return lax.scan(step, x, (w, batch_inputs))[0]

    return Case(stage, normal(1, L, 2, D, D), normal(2, b, T, D), jnp.array([1, 0, 2]))


def with_a_while_loop() -> Case:
    def stage(w, x, batch_inputs, rng):
        y = lax.fori_loop(0, batch_inputs, lambda _, y: y * 0.5, lax.stop_gradient(x))
        return jnp.tanh((x + y) @ w)

    return Case(stage, normal(1, D, D), normal(2, b, T, D), jnp.int32(3))


def with_more_than_arrays_of_floats() -> Case:
    """An activation with counters, weights that only count, and a part that is not read."""

    def stage(w, x, batch_inputs, rng):
        h = jnp.tanh(x["h"] @ w["matrix"]) + w["table"][x["ids"]]
        return {"h": h, "ids": x["ids"] + w["step"], "unread": x["unread"]}

    weights = {"matrix": normal(1, D, D), "table": normal(2, 7, D), "step": jnp.int32(1)}
    x = {
        "h": normal(3, b, T, D),
        "ids": jnp.arange(b * T).reshape(b, T) % 5,
        "unread": normal(4, 3),
    }
    return Case(stage, weights, x)


CASES: dict[str, Callable[[], Case]] = {
    "a dense chain": dense,
    "mlp with dropout": mlp,
    "llama": llama,
    "llama written out": partial(llama, scan_layers=False),
    "llama, layers recomputed": partial(llama, layer_remat=recompute),
    "llama, written out and recomputed": partial(
        llama, layer_remat=jax.checkpoint, scan_layers=False
    ),
    "llama, recomputed": partial(llama, jax.checkpoint),
    "llama, some kept": partial(llama, remat_by_name("save_qkv_proj")),
    "llama, some kept of each layer": partial(llama, layer_remat=remat_by_name("minimal")),
    "deepseek": deepseek,
    "deepseek, recomputed": partial(deepseek, recompute),
    "jit": with_jit,
    "checkpoint of each": partial(dense, jax.checkpoint),
    "custom_vjp": with_custom_vjp,
    "absent layers": with_absent_layers,
    "absent layers, recomputed": partial(with_absent_layers, recompute),
    "kinds of layers": with_two_kinds_of_layers,
    "a while loop": with_a_while_loop,
    "integers": with_more_than_arrays_of_floats,
}

cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
SLOW = (
    "deepseek, recomputed",
    "llama written out",
    "llama, written out and recomputed",
    "llama, some kept",
    "llama, recomputed",
)
some_slow = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] * (name in SLOW))
        for name, case in CASES.items()
    ],
)


def cotangents(case: Case) -> Any:
    out = jax.eval_shape(case.stage, *case.arguments)
    leaves, tree = jax.tree.flatten(floating(out))
    return tree.unflatten([normal(50 + i, *x.shape).astype(x.dtype) for i, x in enumerate(leaves)])


def ones(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.ones(x.shape, jnp.float32), floating(tree))


def true_gradients(case: Case) -> tuple:
    """Of `jax.vjp`, those of weights with 1 added."""

    def of_floating(*differentiated):
        w, x, s = map(combine, differentiated, case.arguments[:3])
        return floating(case.stage(w, x, s, case.rng))

    @jax.jit
    def pull(cotangent):
        _, vjp = jax.vjp(of_floating, *map(floating, case.arguments[:3]))
        dw, dx, ds = vjp(cotangent)
        return jax.tree.map(lambda g: g.astype(jnp.float32) + 1, dw), dx, ds

    return pull(cotangents(case))


def whole(case: Case) -> tuple:
    w, x, batch_inputs, rng = case.arguments
    parts = split_backward(case.stage, *case.arguments)
    _, residuals = parts.forward(w, x, batch_inputs, rng)
    return parts.backward(w, batch_inputs, rng, residuals, cotangents(case), ones(w))


def in_halves(case: Case) -> tuple:
    w, x, batch_inputs, rng = case.arguments
    parts = split_backward(case.stage, *case.arguments)
    _, residuals = parts.forward(w, x, batch_inputs, rng)
    dx, ds, link = parts.input(w, batch_inputs, rng, residuals, cotangents(case))
    kept = [r for r, keep in zip(residuals, parts.for_weight, strict=True) if keep]
    return parts.weight(w, batch_inputs, rng, kept, link, ones(w)), dx, ds


def assert_close(got: Any, true: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(true)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(true), strict=True
    ):
        assert x.dtype == y.dtype and x.shape == y.shape
        scale = max(float(jnp.max(jnp.abs(y))), 1e-30)
        error = float(jnp.max(jnp.abs(x - y))) / scale
        assert error <= TOLERANCE, f"{jax.tree_util.keystr(path)}: {error:.2e}"


@pytest.mark.skipif(not hasattr(jax.config, "jax_remat3"), reason="this JAX has no `jax_remat3`")
@pytest.mark.parametrize(
    "name",
    ["checkpoint of each", pytest.param("llama, layers recomputed", marks=pytest.mark.slow)],
)
def test_the_rematerialization_that_jax_announces_stores_no_more(name: str):
    """`jax.checkpoint` is then another primitive, with the same jaxpr inside."""

    def stored(made: Case) -> list[Any]:
        w, x, batch_inputs, rng = made.arguments
        parts = split_backward(made.stage, *made.arguments)
        residuals = jax.eval_shape(lambda: parts.forward(w, x, batch_inputs, rng)[1])
        link = jax.eval_shape(
            lambda r: parts.input(w, batch_inputs, rng, r, cotangents(made))[2], residuals
        )
        return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((residuals, link))]

    before = stored(CASES[name]())
    now = jax.config.jax_remat3  # pyright: ignore[reportAttributeAccessIssue]
    try:
        jax.config.update("jax_remat3", True)
        made = CASES[name]()
        assert sorted(map(str, stored(made))) == sorted(map(str, before))
        assert_close(jax.jit(lambda: in_halves(made))(), true_gradients(made))
    finally:
        jax.config.update("jax_remat3", now)


@some_slow
def test_the_whole_and_the_halves_are_the_gradients_of_jax(case: Callable[[], Case]):
    made = case()
    both = jax.jit(lambda: (whole(made), in_halves(made)))()
    true = true_gradients(made)
    assert_close(both[0], true)
    assert_close(both[1], true)


@dataclasses.dataclass(frozen=True)
class Programs:
    """Jaxprs of a split."""

    backward: Any
    input: Any
    weight: Any
    num_residuals: int
    num_links: int


def programs(case: Case) -> Programs:
    w, _, batch_inputs, rng = case.arguments
    parts = split_backward(case.stage, *case.arguments)
    residuals = jax.make_jaxpr(lambda *a: parts.forward(*a)[1])(*case.arguments).out_avals
    first = w, batch_inputs, rng, residuals, cotangents(case)
    kept = [r for r, keep in zip(residuals, parts.for_weight, strict=True) if keep]
    input = jax.make_jaxpr(parts.input)(*first)
    link = jax.make_jaxpr(lambda *a: parts.input(*a)[2])(*first).out_avals
    return Programs(
        jax.make_jaxpr(parts.backward)(*first, ones(w)),
        input,
        jax.make_jaxpr(parts.weight)(w, batch_inputs, rng, kept, link, ones(w)),
        len(residuals),
        len(link),
    )


def inner(equation: Any) -> list[Any]:
    """The jaxprs in an equation."""
    parameters = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: x is None)
    jaxprs = (getattr(p, "jaxpr", p) for p in parameters)
    return [j for j in jaxprs if hasattr(j, "eqns")]


def operations(jaxpr: Any, count: Callable[[Any], int]) -> int:
    """The sum of `count` over all equations, those of a loop as often as they run."""
    total = 0
    for equation in jaxpr.eqns:
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += count(equation) + times * sum(operations(j, count) for j in inner(equation))
    return total


def flops(equation: Any) -> int:
    out = int(np.prod([*equation.outvars[0].aval.shape])) if equation.outvars else 0
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2 * out * int(np.prod([equation.invars[0].aval.shape[i] for i in contracted]))
    if equation.primitive.name in ("ragged_dot", "ragged_dot_general"):
        rows, groups = (x.aval.shape for x in equation.invars[:2])
        return 2 * rows[0] * rows[1] * (groups[-1] if len(groups) == 3 else groups[1])
    return 0


def dots(equation: Any) -> int:
    return "dot" in equation.primitive.name


@cases
def test_the_halves_have_the_products_of_the_whole(case: Callable[[], Case]):
    made = programs(case())
    halves = operations(made.input.jaxpr, flops) + operations(made.weight.jaxpr, flops)
    assert halves <= 1.02 * operations(made.backward.jaxpr, flops)


KEPT = (dense, with_jit, with_custom_vjp, with_absent_layers, mlp, llama, deepseek)


@pytest.mark.parametrize("case", KEPT)
def test_the_second_half_has_one_product_for_each_matrix_and_the_first_no_such(case: Any):
    made = programs(case())
    whole, now, later = (
        operations(p.jaxpr, dots) for p in (made.backward, made.input, made.weight)
    )
    num_dims = [x.ndim for x in jax.tree.leaves(case().weights)]
    if case in (dense, with_jit):
        assert later == sum(n == 2 for n in num_dims)
    else:
        assert later == L * sum(n > 2 for n in num_dims)
    # In attention activations meet, too: four products of a layer are not about weights. And the
    # whole has three for the experts that nothing reads: `ragged_dot` under `custom_vmap`.
    between = {llama: 4 * L, deepseek: 4 * L}.get(case, 0)
    assert now == later + between
    assert whole == now + later + (3 * L if case is deepseek else 0)


@cases
def test_a_link_is_no_input_and_none_is_there_twice(case: Callable[[], Case]):
    made = case()
    jaxpr, num_links = (program := programs(made)).input.jaxpr, program.num_links
    links = jaxpr.outvars[len(jaxpr.outvars) - num_links :]
    num_cotangents = len(jax.tree.leaves(cotangents(made)))
    inputs = jaxpr.invars[: len(jaxpr.invars) - num_cotangents]
    assert not [x for x in links if any(x is y for y in inputs)]
    assert len({id(x) for x in links}) == num_links
    assert not [x for x in links if not hasattr(x, "count") and hasattr(x, "val")]


def bytes_of(variables: Any) -> int:
    return sum(x.aval.size * x.aval.dtype.itemsize for x in variables)


def test_what_the_second_half_of_a_llama_needs_are_both_factors_of_its_products():
    case = llama(jax.checkpoint)  # so that every factor is a link
    made = programs(case)
    links = made.input.jaxpr.outvars[-made.num_links :]
    widths = (
        (D, 32, 16, 16),  # the input of attention, and gradients of queries, keys and values
        (32, D),  # what attention returns, and the gradient of the branch
        (D, 32, 32),  # the input of the MLP, gradients of gate and up
        (32, D),  # the hidden layer, and the gradient of the branch
    )
    factors = L * b * T * sum(map(sum, widths))
    scales = L * D * 2  # gradients of norms: smaller than what they are made of
    assert bytes_of(links) == 4 * (factors + scales)


@pytest.fixture
def standard_promotion():
    """What JAX's own attention needs in bfloat16."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("standard_promotion")
def test_links_are_as_narrow_as_what_layers_compute_in():
    wide, narrow = (programs(llama(dtype=d)) for d in (jnp.float32, jnp.bfloat16))
    of = lambda made: bytes_of(made.input.jaxpr.outvars[-made.num_links :])  # noqa: E731
    assert of(narrow) * 2 == of(wide)


@pytest.mark.usefixtures("standard_promotion")
def test_gradients_are_summed_in_float32_where_weights_are_bfloat16():
    case = llama(dtype=jnp.bfloat16)
    gradient, dx, _ = jax.jit(lambda: whole(case))()
    again, _, _ = jax.jit(lambda: in_halves(case))()
    for x, y in zip(jax.tree.leaves(gradient), jax.tree.leaves(again), strict=True):
        assert x.dtype == y.dtype == jnp.float32
        np.testing.assert_array_equal(x, y)
    assert dx.dtype == jnp.bfloat16


def test_a_stage_with_side_effects_is_refused():
    def stage(w, x, batch_inputs, rng):
        jax.debug.print("{}", x)
        return x * w

    with pytest.raises(ValueError, match=r"A stage has the effects .* must be pure: take prints"):
        split_backward(stage, jnp.ones(3), jnp.ones(3), (), ())


# --- On ranks


def ranked(case: Case) -> tuple:
    """Weights, activations and batch_inputs of two ranks, and the gradients of each by itself."""
    other = dataclasses.replace(
        case, x=jax.tree.map(lambda x: -x, case.x), weights=jax.tree.map(jnp.flip, case.weights)
    )
    stacked = jax.tree.map(lambda *x: jnp.stack(x), case.arguments[:3], other.arguments[:3])
    true = jax.tree.map(lambda *x: jnp.stack(x), true_gradients(case), true_gradients(other))
    return stacked, true


def on_rank(case: Case) -> Callable:
    """What a rank does with its own, behind a condition as in a pipeline."""

    def run(weights, x, batch_inputs):
        here = dataclasses.replace(case, weights=weights, x=x, batch_inputs=batch_inputs)
        both = lambda: (whole(here), in_halves(here))  # noqa: E731
        nothing = 0 * jnp.sum(jax.tree.leaves(x)[0])
        skip = lambda: jax.tree.map(lambda g: jnp.zeros(g.shape) + nothing, jax.eval_shape(both))  # noqa: E731
        return lax.cond(lax.axis_index("stage") < 2, both, skip)

    return run


@pytest.mark.parametrize(
    "case",
    [*(pytest.param(case, marks=pytest.mark.slow) for case in (mlp, deepseek)), with_absent_layers],
)
def test_under_vmap_every_rank_has_its_own_gradients(case: Callable[[], Case]):
    made = case()
    stacked, true = ranked(made)
    for got in jax.jit(jax.vmap(on_rank(made), axis_name="stage"))(*stacked):
        assert_close(got, true)


def on_mesh(mesh: Any, local: Callable) -> Callable:
    """`local` of a rank's own weights, activations and batch_inputs, on all ranks of a mesh."""

    def on_one(*stacked):
        return jax.tree.map(lambda x: x[None], local(*index_leading(stacked, 0)))

    spec = PartitionSpec("stage")
    return jax.shard_map(on_one, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"stage"})


@pytest.mark.parametrize(
    "case", [mlp, pytest.param(llama, marks=pytest.mark.slow), with_absent_layers]
)
def test_on_a_mesh_every_rank_has_its_own_gradients(case: Callable[[], Case]):
    made = case()
    stacked, true = ranked(made)
    mesh = sharding.make_mesh({"stage": 2}, devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        for got in jax.jit(on_mesh(mesh, on_rank(made)))(*stacked):
            assert_close(got, true)


@pytest.mark.slow
def test_experts_on_their_own_devices_wait_for_the_second_half_too():
    stacked, true = ranked(deepseek())
    mesh = sharding.make_mesh({"stage": 2, "expert": 2}, devices=jax.devices()[:4])
    made = deepseek(constrain=sharding.Constrain())
    products = {}

    def run(weights, x, batch_inputs):
        here = dataclasses.replace(made, weights=weights, x=x, batch_inputs=batch_inputs)
        parts = programs(here)
        for name in ("input", "weight"):
            products[name] = operations(getattr(parts, name).jaxpr, ragged)
        return on_rank(made)(weights, x, batch_inputs)

    with jax.set_mesh(mesh):
        for got in jax.jit(on_mesh(mesh, run))(*stacked):
            assert_close(got, true)
    assert products == {"input": 3 * L, "weight": 3 * L}


def ragged(equation: Any) -> int:
    return "ragged_dot" in equation.primitive.name
