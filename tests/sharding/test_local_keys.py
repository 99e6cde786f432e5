"""What devices draw for their own rows: the part of what `jax.random` draws for all of them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpipe.sharding import local_draws, make_mesh
from jaxpipe.sharding._rows import _product

DRAWS: dict[str, Callable] = {
    "bernoulli": lambda key, shape: jax.random.bernoulli(key, 0.9, shape),
    "normal": lambda key, shape: jax.random.normal(jax.random.fold_in(key, 3), shape),
    "bfloat16": lambda key, shape: jax.random.uniform(key, shape, jnp.bfloat16),
    "bytes": lambda key, shape: jax.random.bits(jax.random.split(key)[1], shape, jnp.uint8),
}


def drawn(draw: Callable, key: jax.Array, shape: tuple[int, ...]) -> jax.stages.Lowered:
    def on_device() -> jax.Array:
        return local_draws(draw, key, shape)

    mesh = make_mesh({"stage": 2, "data": 2, "fsdp": 2})
    on_devices = jax.shard_map(
        on_device, mesh=mesh, in_specs=(), out_specs=P(("data", "fsdp")), check_vma=False
    )
    return jax.jit(on_devices).lower()


@pytest.mark.parametrize("shape", [(4,), (2, 3, 5), (3, 1, 7)])
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_rows_of_all_devices_are_what_one_would_draw(impl: str, draw: str, shape: tuple[int, ...]):
    key = jax.random.key(3, impl=impl)
    got = drawn(DRAWS[draw], key, shape).compile()()
    expected = jax.jit(DRAWS[draw], static_argnums=1)(key, (4 * shape[0], *shape[1:]))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


def test_keys_that_do_not_draw_by_place_draw_for_all():
    with jax.threefry_partitionable(False):
        key = jax.random.key(0)
        got = drawn(jax.random.uniform, key, (2, 3)).compile()()
        np.testing.assert_array_equal(got, jax.random.uniform(key, (8, 3)))


def test_by_default_no_device_draws_the_rows_of_others():
    assert "8x33x5xui32" not in drawn(jax.random.uniform, jax.random.key(0), (2, 33, 5)).as_text()


def test_places_have_64_bits():
    for index in (0, 1, 7, 2**16 - 1, 2**16, 70_000, 2**32 - 1):
        for size in (0, 1, 5, 2**16, 12 * 2048 * 4096, 2**32 - 1):
            high, low = _product(jnp.uint32(index), size)
            assert int(high) * 2**32 + int(low) == index * size
