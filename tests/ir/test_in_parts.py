"""Results that are computed in parts are those of the whole program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.ir.transforms import join_parts, results_in_parts
from jaxpipe.ir.transforms._in_parts import InParts

ROWS, TOKENS, DIM = 2, 4096, 128  # 4 MiB in float32


def norm(x, scale=1.0):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def residual(w, x):
    return x + jnp.tanh(x @ w["in"]) @ w["out"]


def biased(w, x):
    return x + 0.5 * (jnp.tanh(x @ w["in"]) @ w["out"] + w["bias"])


def norm_behind(w, x):
    return x + norm(jnp.tanh(x @ w["in"]) @ w["out"], w["bias"])


def dropped(w, x):
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
    return x + jnp.where(kept, jnp.tanh(x @ w["in"]) @ w["out"], 0)


def weights_first(w, x):
    return x + jnp.einsum("de,bte->btd", w["out"], jnp.tanh(x @ w["in"]))


def gated(w, x):
    return x + jax.jit(lambda x: jax.nn.sigmoid(x) * (x @ w["out"]))(x @ w["in"])


def with_dim_in_front(w, x):
    return residual(w, x)[None]


def of_products_with_both(w, x):
    h = x @ w["in"]
    return h @ w["out"] + jnp.sin(h) @ w["in"]


def means_of_tokens(w, x):
    y = jnp.tanh(x @ w["in"]) @ w["out"]
    return x + y - jnp.mean(y, axis=1, keepdims=True)


def earlier_tokens(w, x):
    return x + jnp.cumsum(x @ w["out"], axis=1)


def tokens_in_products(w, x):
    return jnp.einsum("bte,bse->bts", x, x)[..., :DIM] @ w["out"]


def without_product(w, x):
    return jnp.tanh(x) * w["bias"]


CUT = [
    residual,
    biased,
    norm_behind,
    dropped,
    weights_first,
    gated,
    with_dim_in_front,
    of_products_with_both,
    tokens_in_products,
]
WHOLE = [means_of_tokens, earlier_tokens, without_product]


def make(tokens=TOKENS):
    keys = jax.random.split(jax.random.key(0), 4)
    w = {
        "in": jax.random.normal(keys[0], (DIM, DIM)) / DIM**0.5,
        "out": jax.random.normal(keys[1], (DIM, DIM)) / DIM**0.5,
        "bias": jax.random.normal(keys[2], (DIM,)),
    }
    return w, jax.random.normal(keys[3], (ROWS, tokens, DIM))


def run(layer, *arguments):
    """Returns the results of `layer` in parts, and those of the plain function."""
    closed = jax.make_jaxpr(layer)(*arguments)
    program = results_in_parts(closed, 1)
    (y, *others), expected = program(*jax.tree.leaves(arguments)), layer(*arguments)
    return y, others, jax.tree.leaves(expected)


@pytest.mark.parametrize("layer", CUT, ids=lambda f: f.__name__)
def test_a_result_of_a_product_is_computed_in_parts(layer):
    y, _, (expected,) = run(layer, *make())
    assert isinstance(y, InParts)
    tokens = expected.shape[y.dim]
    assert [x.shape[y.dim] for x in y.parts] == [tokens // share for share in (2, 4, 8, 8)]
    np.testing.assert_allclose(join_parts(y), expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("layer", WHOLE, ids=lambda f: f.__name__)
def test_a_result_that_is_no_product_of_each_token_alone_is_whole(layer):
    y, _, (expected,) = run(layer, *make())
    np.testing.assert_array_equal(y, jax.jit(lambda: expected)())


def test_a_result_that_is_also_saved_is_whole():
    def layer(w, x):
        y = jnp.tanh(x @ w["in"]) @ w["out"]
        return x + y, y

    y, (saved,), expected = run(layer, *make())
    assert not isinstance(y, InParts)
    np.testing.assert_allclose(y, expected[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(saved, expected[1], rtol=1e-6, atol=1e-6)


def test_a_result_beside_an_array_that_is_no_input_is_whole():
    table = np.ones((ROWS, TOKENS, DIM), np.float32)
    jax.config.update("jax_use_simplified_jaxpr_constants", True)  # tables are literals then
    try:
        y, _, (expected,) = run(lambda w, x: x @ w["out"] + table, *make())
    finally:
        jax.config.update("jax_use_simplified_jaxpr_constants", False)
    np.testing.assert_allclose(join_parts(y), expected, rtol=0, atol=1e-5)


def test_small_results_and_tokens_that_do_not_divide_are_whole():
    for tokens in (TOKENS // 2, TOKENS + 4):
        assert not isinstance(run(residual, *make(tokens))[0], InParts)


def test_parts_are_computed_one_after_the_other_and_by_no_more_products():
    w, x = make()
    program = results_in_parts(jax.make_jaxpr(residual)(w, x), 1)
    jaxpr = jax.make_jaxpr(program)(*jax.tree.leaves((w, x)))
    results = [e.outvars[0] for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    products = [getattr(x.aval, "shape", None) for x in results]
    assert products == [x.shape, *((ROWS, TOKENS // share, DIM) for share in (2, 4, 8, 8))]
