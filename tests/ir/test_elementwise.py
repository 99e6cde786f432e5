"""Functions of entries, and their derivatives, are known as such on every version of JAX."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from jaxpipe.ir.graph import is_cheap, to_graph
from jaxpipe.ir.rows import Mixed, Rows, compare

OF_NUMPY = """
abs arccos arccosh arcsin arcsinh arctan arctanh cbrt ceil cos cosh exp exp2 expm1 floor log log10
log1p log2 negative reciprocal rint sign sin sinc sinh sqrt square tan tanh
"""
OF_NN = """
celu elu gelu hard_sigmoid hard_silu hard_tanh leaky_relu log_sigmoid mish relu relu6 selu sigmoid
silu soft_sign softplus sparse_plus sparse_sigmoid squareplus
"""
FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    name: getattr(module, name)
    for module, names in ((jnp, OF_NUMPY), (jax.nn, OF_NN), (jax.lax, "erf erf_inv rsqrt"))
    for name in names.split()
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_entries_and_its_derivatives_are_cheap_and_keep_rows(name: str):
    first = jax.grad(lambda x: FUNCTIONS[name](x).sum())
    second = jax.grad(lambda x: first(x).sum())

    def derivatives(x: jax.Array) -> tuple[jax.Array, ...]:
        return FUNCTIONS[name](x), first(x), second(x)

    of_four, of_two = (jax.make_jaxpr(derivatives)(jnp.ones((n, 3))) for n in (4, 2))
    assert all(map(is_cheap, to_graph(of_four).eqns))
    function, *others = compare(of_four, of_two, [Rows(0)], 2)
    assert function == Rows(0)
    assert not any(isinstance(relation, Mixed) for relation in others)  # some are constants
