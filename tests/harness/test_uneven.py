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
from jaxpipe.train.step import init_state, make_value_and_grad, shard_batch

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
SLOW = ("1f1b on 2", "1f1b on 3", "zero bubble on 4", "1f1b on 8")


def gradients(devices: int, *settings: Settings) -> tuple[Any, Any]:
    """Loss and metrics, and the gradients with layers in forward order."""
    setup = setup_of(devices, EIGHT, {"remat_policy": "full"}, *settings)
    engine = make_value_and_grad(setup.step)
    state = init_state(setup.step)
    batch = synthetic_batches(vocab_size=64, batch_size=ROWS, length=16, seed=0)(0)
    with jax.set_mesh(setup.mesh):
        batch = shard_batch(setup.batch, batch)
        value, grads = jax.jit(engine)(state["weights"], batch, jnp.int32(3))
    return jax.device_get(value), flat(setup, state | {"weights": grads})


def assert_same_gradients(found: Any, true: Any) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(found["weights"])
    for (path, leaf), other in zip(leaves, jax.tree.leaves(true["weights"]), strict=True):
        assert leaf.shape == other.shape and np.any(other)
        assert_close(leaf, other, jax.tree_util.keystr(path))


def check_on(platform: str, monkeypatch: Any, truth: Any, devices: int, *settings: Settings):
    """Checks loss and gradients of what is done on one platform alone."""
    (true_loss, _), true = truth
    monkeypatch.setattr(_compat, "platform", lambda: platform)
    (loss, _), found = gradients(devices, *settings)
    assert_close(loss, true_loss, "loss")
    assert_same_gradients(found, true)


def recorded(monkeypatch: Any, name: str, *modules: Any) -> list[Any]:
    """Arguments of the calls of a function that modules import, which goes on as it did."""
    calls, function = [], getattr(modules[0], name)

    def record(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return function(*arguments, **options)

    for module in modules:
        monkeypatch.setattr(module, name, record)
    return calls


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


TWO_RANKS: Settings = {"pipeline_engine": "scheduled", "ici_pipeline_parallelism": 2}
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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("I and W", "windows") else ())
        for name in IN_LOOPS
    ],
)
def test_where_xla_copies_in_conditionals_loops_compute_the_same(name, monkeypatch):
    true = plain("llama")
    loops = recorded(monkeypatch, "run_once_if", _in_place, _varying)
    devices, settings = IN_LOOPS[name]
    check_on("gpu", monkeypatch, true, devices, MODELS["llama"], TWO_RANKS, settings)
    assert loops


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
    true = plain("llama")
    laid_out = recorded(monkeypatch, "row_major", _entries)
    devices, settings = ENTRIES[name]
    policy = {"remat_policy": "minimal_with_context"}
    check_on("tpu", monkeypatch, true, devices, MODELS["llama"], TWO_RANKS, policy | settings)
    assert laid_out


# Without a pipeline, weights of layers keep the layout of stored ones, and routers sort.
UNPIPELINED: dict[str, Settings] = {
    "llama": {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
    "deepseek": {"ici_tensor_parallelism": 2, "ici_expert_parallelism": 2},
}


@pytest.mark.parametrize("model", ["llama", pytest.param("deepseek", marks=pytest.mark.slow)])
def test_what_is_done_on_gpus_alone_computes_the_same_without_a_pipeline(model, monkeypatch):
    true = plain(model)
    layouts = recorded(monkeypatch, "as_stored", _per_layer)
    check_on("gpu", monkeypatch, true, 4, MODELS[model], NONE, UNPIPELINED[model])
    assert layouts
