"""The step that is compiled ahead of time is the step that training runs."""

import jax
import numpy as np
import pytest

from jaxpipe.data import synthetic_batches
from jaxpipe.models import PRESETS
from jaxpipe.train import compile_train_step, load_config, set_up
from jaxpipe.train.step import (
    compile_ahead,
    init_state,
    make_train_step,
    mesh_context,
    shard_batch,
)

SETTINGS = (
    "ici_pipeline_parallelism=2",
    "ici_fsdp_parallelism=4",
    "dtype=float32",
    "base_emb_dim=16",
    "base_num_decoder_layers=2",
    "base_mlp_dim=32",
    "max_target_length=16",
    "per_device_batch_size=1",
)


def test_what_is_compiled_ahead_takes_real_states_and_batches_and_gives_the_same():
    setup = set_up(load_config((), SETTINGS, presets=PRESETS), jax.devices())
    sizes = {"batch_size": setup.batch.num_rows, "length": 16}
    batch = shard_batch(setup.batch, synthetic_batches(vocab_size=320, seed=0, **sizes)(0))
    ahead, metrics = compile_train_step(setup.step)(init_state(setup.step), batch)
    with jax.set_mesh(setup.mesh):
        now, expected = make_train_step(setup.step)(init_state(setup.step), batch)
    jax.tree.map(np.testing.assert_array_equal, (ahead, metrics), (now, expected))


@pytest.mark.parametrize("engine", ["circular", pytest.param("mpmd", marks=pytest.mark.slow)])
def test_the_first_call_of_a_step_that_was_compiled_compiles_nothing(engine: str):
    settings = (*SETTINGS, f"pipeline_engine={engine}")
    plan = set_up(load_config((), settings, presets=PRESETS), jax.devices()).step
    sizes = {"batch_size": plan.batch.num_rows, "length": 16}
    batch = shard_batch(plan.batch, synthetic_batches(vocab_size=320, seed=0, **sizes)(0))
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        events.append(event)

    with mesh_context(plan):
        state, step = init_state(plan), make_train_step(plan)
        compile_ahead(plan, step, state, batch)
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            state, metrics = step(state, batch)
            jax.device_get(metrics)
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
    assert "/jax/core/compile/backend_compile_duration" not in events
