"""What a pipeline needs, by arithmetic."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxpipe as jp
from jaxpipe.autodiff import keep

D, V, L, B = 8, 16, 4, 16
LAYER, EMBED, HEAD = 4 * D * D, 4 * V * D, 4 * D

MODEL = jp.Model(
    embed=lambda w, batch: w[batch],
    layer=lambda w, x, batch: x + jnp.tanh(x @ w),
    loss=lambda w, x, batch: jnp.mean(x @ w),
)
PARAMS = {
    "embed": jax.ShapeDtypeStruct((V, D), jnp.float32),
    "layers": jax.ShapeDtypeStruct((L, D, D), jnp.float32),
    "head": jax.ShapeDtypeStruct((D,), jnp.float32),
}
BATCH = jax.ShapeDtypeStruct((B,), jnp.int32)
INPUT = 4 * (B // 4) * D  # of a stage, one microbatch of 4


def pipeline(schedule: Any = "1f1b", sizes: Any = None, **options: Any) -> Any:
    sizes = sizes or {"stage": 2}
    mesh = jp.make_mesh(sizes, devices=jax.devices()[: 2 * len(sizes)])
    return jp.pipeline(MODEL, schedule=schedule, mesh=mesh, microbatches=4, **options)


def test_ranks_of_programs_of_their_own_differ():
    found = pipeline(engine="mpmd").memory(PARAMS, BATCH)
    weights = (2 * LAYER + EMBED, 2 * LAYER + HEAD)
    assert found.parameters == found.gradients == weights
    assert found.optimizer == (2 * weights[0], 2 * weights[1])
    assert found.activations == (2 * INPUT, INPUT)  # peaks of 1F1B


def test_ranks_of_one_program_are_alike():
    pipe = pipeline()
    found = pipe.memory(PARAMS, BATCH, "v5e", num_moments=1)
    assert found.parameters == found.optimizer == (2 * LAYER + EMBED + HEAD,) * 2
    assert found.activations == (3 * INPUT,) * 2  # peak of 1F1B in lock-step
    assert found.fits
    assert "17.2 GB of a v5e" in str(found)
    assert str(found).startswith("kB per device")
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), PARAMS)
    assert pipe.memory(pipe.shard(zeros), BATCH, "v5e", num_moments=1) == found


def test_copies_of_stages_count_and_have_no_moments():
    whole = (4 * LAYER + EMBED + HEAD,) * 2  # each rank runs both stages
    found = pipeline("dualpipe", engine="mpmd").memory(PARAMS, BATCH)
    assert found.parameters == found.gradients == whole
    assert found.optimizer == (2 * (2 * LAYER + EMBED), 2 * (2 * LAYER + HEAD))
    found = pipeline("dualpipe").memory(PARAMS, BATCH)
    assert found.parameters == found.gradients == whole
    assert found.optimizer == (2 * (2 * LAYER + EMBED + HEAD),) * 2


def test_shards_divide_and_an_unpipelined_program_has_everything():
    found = pipeline(sizes={"stage": 2, "fsdp": 2}).memory(PARAMS, BATCH)
    assert found.parameters == ((2 * LAYER + EMBED + HEAD) // 2,) * 2
    assert found.activations == (3 * INPUT // 2,) * 2
    found = pipeline(None).memory(PARAMS, BATCH)
    assert found.parameters == (L * LAYER + EMBED + HEAD,) * 2
    assert found.activations == (3 * L * INPUT,) * 2  # x, and two residuals of tanh, of each layer
    for options, count in (({"remat": "full"}, 1), ({"layer_remat": "full"}, L)):
        assert pipeline(None, **options).memory(PARAMS, BATCH).activations == (count * INPUT,) * 2


def test_residuals_are_stored_without_recomputation():
    found = pipeline(engine="mpmd", remat=keep).memory(PARAMS, BATCH)
    assert found.activations[1] >= 2 * 2 * INPUT  # input and tanh of two layers


def test_what_does_not_fit_is_said_and_unknown_devices_are_refused():
    large = PARAMS | {"embed": jax.ShapeDtypeStruct((10**9, D), jnp.float32)}
    found = pipeline().memory(large, BATCH)
    assert not found.fits
    assert "does not fit: at least 125" in str(found)
    assert str(found).startswith("MB per device")
    with pytest.raises(ValueError, match=r"`device` is 'v9'\. Give one of v4, v5e, v5p"):
        pipeline().memory(PARAMS, BATCH, "v9")
