"""The look-up of tokens, against `jnp.take` from the whole table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpipe.models._boundary import embed_tokens
from jaxpipe.sharding import Constrain, make_mesh


@pytest.mark.parametrize("axis", ["context", "fsdp"])
@pytest.mark.parametrize("manual", [(), ("stage",), ("stage", "fsdp")], ids="-".join)
def test_tokens_are_looked_up_in_a_table_whose_vocabulary_is_sharded(axis, manual):
    mesh = make_mesh({"stage": 2, "tensor": 2, axis: 2})
    table = jax.random.normal(jax.random.key(0), (32, 16))
    # -1 counts from the end, 32 and -33 are not in the table.
    tokens = jax.random.randint(jax.random.key(1), (4, 8), 0, 32).at[0, :3].set([-1, 32, -33])
    axes = tuple(name for name in manual if name in mesh.shape)

    def look_up(table, tokens):
        return embed_tokens(table, tokens, constrain=Constrain(), dtype=jnp.float32)[None]

    if axes:
        look_up = jax.shard_map(
            look_up, axis_names={*axes}, in_specs=(P(), P()), out_specs=P(axes), check_vma=False
        )
    copies = int(np.prod([mesh.shape[name] for name in axes]))

    def loss(look_up, table):
        return jnp.nansum(look_up(table, tokens) ** 2)

    with jax.set_mesh(mesh):
        x, grad = jax.jit(
            lambda table: (look_up(table, tokens), jax.grad(loss, argnums=1)(look_up, table))
        )(table)
    plain = lambda table, tokens: jnp.take(table, tokens, axis=0)  # noqa: E731
    np.testing.assert_array_equal(x, np.stack([plain(table, tokens)] * copies))
    expected = copies * jax.grad(loss, argnums=1)(plain, table)
    np.testing.assert_allclose(grad, expected, rtol=1e-6)
