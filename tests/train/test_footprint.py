"""What arithmetic says a run keeps is what its devices hold."""

import math
from typing import Any

import jax
import pytest

from jaxpipe.models import LlamaConfig
from jaxpipe.mpmd.ir import RunTask
from jaxpipe.schedules.lock_step import tick_tables
from jaxpipe.train.estimate import estimate_memory
from jaxpipe.train.plan import Setup
from jaxpipe.train.step import init_state, lower_train_step, state_shapes

from .runs import NONE, Settings, setup_of

S2F2: Settings = {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2}
MPMD: Settings = {"pipeline_engine": "mpmd", "ici_pipeline_parallelism": 2}
ONE_PROGRAM: dict[str, tuple[int, Settings]] = {
    "circular": (4, S2F2),
    "scheduled, a V": (4, S2F2 | {"pipeline_engine": "scheduled", "pipeline_schedule": "zbv"}),
    "no pipeline, zero": (
        4,
        NONE
        | {
            "ici_fsdp_parallelism": 2,
            "ici_data_parallelism": 2,
            "shard_optimizer_over_data": True,
            "num_pipeline_microbatches": 1,
        },
    ),
}


def on_device(device: Any, tree: Any) -> int:
    """Bytes of a tree that lie there."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    shards = (shard for leaf in leaves for shard in leaf.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


@pytest.mark.parametrize("name", ONE_PROGRAM)
def test_every_device_holds_the_weights_and_the_optimizer_that_it_says(name: str):
    setup = setup_of(ONE_PROGRAM[name][0], ONE_PROGRAM[name][1])
    state, (found,) = init_state(setup.step), estimate_memory(setup.step)
    for device in setup.mesh.devices.flat:
        assert on_device(device, state["weights"]) == found.weights
        assert on_device(device, state["optimizer"]) == found.optimizer


def test_copies_of_stages_count_and_have_no_moments():
    settings: Settings = {"pipeline_engine": "scheduled", "ici_pipeline_parallelism": 2}
    setups = [setup_of(2, settings, {"pipeline_schedule": s}) for s in ("1f1b", "dualpipe")]
    (plain,), (dual,) = (estimate_memory(setup.step) for setup in setups)
    stages = state_shapes(setups[0].state)["weights"]["stages"]
    copied = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(stages)) // 2
    assert dual.weights - plain.weights == dual.gradients - plain.gradients == copied
    assert dual.optimizer == plain.optimizer


@pytest.mark.parametrize(
    "settings",
    [{}, pytest.param({"logits_via_embedding": False}, marks=pytest.mark.slow)],
    ids=["tied", "untied"],
)
def test_every_rank_holds_its_stages_and_the_ends_that_it_reads(settings: Settings):
    layout = {"pipeline_schedule": "1f1b", "pipeline_layout": "Et|t*3L"}
    setup = setup_of(2, MPMD | layout, settings)
    state, found = init_state(setup.step), estimate_memory(setup.step)
    for rank, kept in enumerate(found):
        weights, optimizer = (_on_rank(rank, state[part]) for part in ("weights", "optimizer"))
        assert weights == kept.weights
        assert optimizer == kept.optimizer
    assert found[0].weights != found[1].weights


def _on_rank(rank: int, tree: Any) -> int:
    held = (leaf._partially_addressable_arrays.get(rank) for leaf in jax.tree.leaves(tree))
    return sum(array.nbytes for array in held if array is not None)


def stored(setup: Setup, **options: Any) -> tuple[int, ...]:
    """Residuals of stages that every rank has room for."""
    plan = setup.pipeline.with_options(**options)
    return tuple(buffers.residuals for buffers in setup.step.engine.buffers(plan))


def test_a_loop_keeps_what_enters_every_tick_and_a_schedule_what_waits():
    circular = setup_of(2, {"ici_pipeline_parallelism": 2})
    assert stored(circular) == (4 * 2 + 1,) * 2
    assert stored(circular, forwarding_delay=True) == (4 * 2 + 2,) * 2
    assert stored(setup_of(2, MPMD | {"pipeline_schedule": "1f1b"})) == (2, 1)
    scheduled = MPMD | {"pipeline_engine": "scheduled", "pipeline_schedule": "1f1b"}
    in_ticks = setup_of(2, scheduled)
    most, _ = stored(in_ticks)
    assert f", {most} stage inputs held at most" in (in_ticks.schedule_reason or "")


def test_calls_keep_a_sum_of_gradients_in_float32_and_some_programs_of_ranks_one_for_each_call():
    three, low = {"gradient_accumulation_steps": 3}, {"weight_dtype": "bfloat16"}
    one, several = (estimate_memory(setup_of(4, S2F2, low, calls).step)[0] for calls in ({}, three))
    assert several.gradients == one.gradients + 2 * one.weights
    for dtype in ("float32", "bfloat16"):  # one sum; or two calls, of half the size
        ranks = zip(
            *(
                estimate_memory(setup_of(2, MPMD, calls, {"weight_dtype": dtype}).step)
                for calls in ({}, three)
            ),
            strict=True,
        )
        for one, several in ranks:
            assert several.gradients == 2 * one.gradients


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_programs_of_ranks_keep_of_gradients_until_the_last_call_is_counted(dtype):
    calls = {"gradient_accumulation_steps": 3, "logits_via_embedding": False}
    setup = setup_of(2, MPMD, calls, {"weight_dtype": dtype})
    runs = [
        run for run in lower_train_step(setup.step).program.instructions if isinstance(run, RunTask)
    ]
    of_rank = [run for run in runs if run.rank == 0]
    made = {b for run in of_rank if not run.name.startswith("before_loop") for b in run.writes}
    after = {b for run in of_rank if run.name.startswith("after_loop") for b in run.reads}
    avals = [buffer.value.aval for buffer in made & after if buffer.value.aval.ndim]
    found = estimate_memory(setup.step)[0]
    kept = sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)
    assert kept == found.gradients


def test_slices_store_their_inputs_and_one_state_for_each_microbatch():
    slices = {"pipeline_engine": "scheduled", "ici_pipeline_parallelism": 2}
    slices |= {"pipeline_schedule": "seq1f1b", "num_pipeline_slices": 4}
    plan = setup_of(2, slices).step
    (found,) = estimate_memory(plan)
    batch, sizes = plan.batch, plan.state.weights.sizes
    tokens = batch.microbatch_size * batch.length
    assert plan.pipeline.ticks is not None and isinstance(sizes, LlamaConfig)
    slots = tick_tables(plan.pipeline.ticks).num_slots
    keys_and_values = 2 * tokens * sizes.base_num_kv_heads * sizes.head_dim * 4
    states = slots["past"] + slots["past_cotangents"]
    entries = slots["residuals_for_backward"] + slots["inputs"] + slots["cotangents"] + 1
    inputs = entries * tokens * sizes.base_emb_dim * 4 // 4
    assert found.activations == inputs + states * 2 * keys_and_values  # 2 layers in a stage
