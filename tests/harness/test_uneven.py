"""Stages with different numbers of layers: loss and every gradient of the unpipelined program."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train.runs import DEEPSEEK, DROPOUT, NONE, ROWS, Settings, flat, setup_of

from harness.contract import assert_close
from jaxpipe import _compat
from jaxpipe.data import synthetic_batches
from jaxpipe.ir.graph import _in_place
from jaxpipe.ir.transforms import _entries
from jaxpipe.spmd.ranks import _varying
from jaxpipe.spmd.weight_gather import _per_layer
from jaxpipe.train.step import dropout_keys, init_state, make_value_and_grad, shard_batch

EIGHT: Settings = {"base_num_decoder_layers": 8}
# Devices, ranks, and what differs. Every run of a line has the same layers.
LAYOUTS: dict[str, tuple[int, int, Settings]] = {
    "1f1b on 2": (2, 2, {"pipeline_schedule": "1f1b", "pipeline_layout": "Et|t*7L"}),
    "1f1b on 3": (3, 3, {"pipeline_schedule": "1f1b", "pipeline_layout": "Et*4|t|t*3L"}),
    "zero bubble on 4": (
        4,
        4,
        {"pipeline_schedule": "zero_bubble_h1", "pipeline_layout": "E|t*3|t*4|tL"},
    ),
    "interleaved on 2, fsdp 2": (
        4,
        2,
        {"pipeline_schedule": "interleaved_1f1b", "pipeline_layout": "Et|t*3|tt|ttL"}
        | {"ici_fsdp_parallelism": 2, "pipeline_fsdp_ag_once": True},
    ),
    "zbv on 3, keeping all": (
        3,
        3,
        {"pipeline_schedule": "zbv", "pipeline_layout": "Et|t|tt|t|tt|tL", "remat_policy": "none"},
    ),
    "1f1b on 8": (8, 8, {"pipeline_schedule": "1f1b", "pipeline_layout": "E|tt|t|t|t|t|t|tL"}),
}


# Each differs from another layout in a count or a schedule that other tests of engines run.
SLOW = ("1f1b on 3", "zero bubble on 4", "1f1b on 8")


def gradients(devices: int, *settings: Settings) -> tuple[Any, Any]:
    """Loss and metrics, and the gradients with layers in forward order."""
    setup = setup_of(devices, EIGHT, {"remat_policy": "full"}, *settings)
    engine = make_value_and_grad(setup.step)
    state = init_state(setup.step)
    batch = synthetic_batches(vocab_size=64, batch_size=ROWS, length=16, seed=0)(0)
    with jax.set_mesh(setup.mesh):
        keys = jax.jit(
            functools.partial(dropout_keys, setup.step.dropout_seed, setup.pipeline.layout)
        )(jnp.int32(3))
        value, grads = jax.jit(engine)(state["weights"], shard_batch(setup.batch, batch), keys)
    return jax.device_get(value), flat(setup, state | {"weights": grads})


def assert_same_gradients(found: Any, true: Any) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(found["weights"])
    for (path, leaf), other in zip(leaves, jax.tree.leaves(true["weights"]), strict=True):
        assert leaf.shape == other.shape and np.any(other)
        assert_close(leaf, other, jax.tree_util.keystr(path))


@functools.cache
def plain(model: str) -> tuple[Any, Any]:
    return gradients(1, MODELS[model], NONE)


MODELS: dict[str, Settings] = {
    "llama": DROPOUT,
    "deepseek": DEEPSEEK | {"base_num_decoder_layers": 9},
}


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        *(
            pytest.param(name, "llama", marks=[pytest.mark.slow] * (name in SLOW))
            for name in LAYOUTS
        ),
        pytest.param("1f1b on 2", "deepseek", marks=pytest.mark.slow),
        pytest.param("interleaved on 2, fsdp 2", "deepseek", marks=pytest.mark.slow),
    ],
)
def test_uneven_stages_have_the_loss_and_gradients_of_the_unpipelined_program(layout, model):
    devices, ranks, settings = LAYOUTS[layout]
    engine = {"pipeline_engine": "scheduled", "ici_pipeline_parallelism": ranks}
    (loss, metrics), found = gradients(devices, MODELS[model], engine, settings)
    (true_loss, true_metrics), true = plain(model)
    assert_close(loss, true_loss, "loss")
    assert metrics.keys() == true_metrics.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(value, true_metrics[name], rtol=1e-5, err_msg=name)
    assert_same_gradients(found, true)


# Conditions of all kinds: of masks, of phases of a tick, of the stream and of windows.
IN_LOOPS: dict[str, tuple[int, Settings]] = {
    "masks": (2, LAYOUTS["1f1b on 2"][2] | {"set_remat_policy_on_layers_per_stage": True}),
    "I and W": (2, {"pipeline_schedule": "zero_bubble_h1", "pipeline_vocab_parallel": True}),
    "windows": (
        4,
        {"pipeline_schedule": "looped_bfs", "num_pipeline_repeats": 2}
        | {"ici_fsdp_parallelism": 2, "pipeline_fsdp_ag_per_repeat": True},
    ),
    "circular": (
        4,
        {"pipeline_engine": "circular", "num_pipeline_repeats": 4}
        | {"ici_fsdp_parallelism": 2, "pipeline_fsdp_ag_once": True},
    ),
}


@pytest.mark.parametrize("name", IN_LOOPS)
def test_where_xla_copies_in_conditionals_loops_compute_the_same(name, monkeypatch):
    loops = []
    run_once_if = _in_place.run_once_if

    def counted(*arguments: Any, **options: Any) -> Any:
        loops.append(arguments)
        return run_once_if(*arguments, **options)

    monkeypatch.setattr(_compat, "platform", lambda: "gpu")
    monkeypatch.setattr(_in_place, "run_once_if", counted)
    monkeypatch.setattr(_varying, "run_once_if", counted)
    devices, settings = IN_LOOPS[name]
    engine = {"pipeline_engine": "scheduled", "ici_pipeline_parallelism": 2}
    (loss, _), found = gradients(devices, MODELS["llama"], engine, settings)
    (true_loss, _), true = plain("llama")
    assert loops
    assert_close(loss, true_loss, "loss")
    assert_same_gradients(found, true)


# Stages of one layer each, whose residuals, weights and sums are whole entries of buffers.
ENTRIES: dict[str, tuple[int, Settings]] = {
    "interleaved": (2, {"pipeline_schedule": "interleaved_1f1b", "num_pipeline_repeats": 4}),
    "zero bubble, gathered once": (
        4,
        {"pipeline_schedule": "interleaved_zero_bubble", "num_pipeline_repeats": 4}
        | {"ici_fsdp_parallelism": 2, "pipeline_fsdp_ag_once": True},
    ),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_row_major_entries_of_buffers_compute_the_same(name, monkeypatch):
    laid_out = []
    constrain = _entries.with_layout_constraint
    monkeypatch.setattr(_compat, "platform", lambda: "tpu")
    monkeypatch.setattr(
        _entries,
        "with_layout_constraint",
        lambda x, layout: laid_out.append(x) or constrain(x, layout),
    )
    devices, settings = ENTRIES[name]
    engine = {"pipeline_engine": "scheduled", "ici_pipeline_parallelism": 2}
    policy = {"remat_policy": "minimal_with_context"}
    (loss, _), found = gradients(devices, MODELS["llama"], engine, policy | settings)
    (true_loss, _), true = plain("llama")
    assert laid_out
    assert_close(loss, true_loss, "loss")
    assert_same_gradients(found, true)


# Without a pipeline, weights of layers keep the layout of stored ones, and routers sort.
UNPIPELINED: dict[str, Settings] = {
    "llama": {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
    "deepseek": {"ici_tensor_parallelism": 2, "ici_expert_parallelism": 2},
}


@pytest.mark.parametrize("model", UNPIPELINED)
def test_what_is_done_on_gpus_alone_computes_the_same_without_a_pipeline(model, monkeypatch):
    true = plain(model)
    monkeypatch.setattr(_compat, "platform", lambda: "gpu")
    layouts = []
    kept = _per_layer.as_stored
    monkeypatch.setattr(_per_layer, "as_stored", lambda *args: layouts.append(args) or kept(*args))
    (loss, _), found = gradients(4, MODELS[model], NONE, UNPIPELINED[model])
    assert layouts
    assert_close(loss, true[0][0], "loss")
    assert_same_gradients(found, true[1])
