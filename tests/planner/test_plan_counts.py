"""What plans count is what programs have: ticks, buffers, and keys that change them."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

import jaxpipe as jp
from jaxpipe.engines import StepCounts
from jaxpipe.kernels import splash_attention
from jaxpipe.planner import parse_devices
from jaxpipe.schedules import FAMILIES, Costs, lock_step, makespan
from jaxpipe.sharding import DEFAULT_RULES
from jaxpipe.train.planning import make_request

D, ROWS, RANKS, MICROBATCHES = 8, 3, 4, 8
MODEL = jp.Model(
    embed=lambda w, batch: batch @ w,
    layer=lambda w, x, batch: x + jnp.tanh(x @ w),
    loss=lambda w, x, batch: jnp.mean(x @ w),
)
# A schedule with slices needs a layer with `past`: tests/api/test_slices.py counts its buffers.
WHOLE = [name for name, family in FAMILIES.items() if "slices" not in family.takes]


def pipeline(name: str | None, **options: Any) -> tuple[Any, Any]:
    """A pipeline of stages of one layer, and what its engine is told."""
    mesh = jp.make_mesh({"stage": RANKS}, devices=jax.devices()[:RANKS])
    pipe = jp.pipeline(MODEL, schedule=name, mesh=mesh, microbatches=MICROBATCHES, **options)
    return pipe, pipe.plan(1 if pipe.schedule is None else pipe.schedule.num_stages)


def loops(pipe: Any, num_layers: int) -> list[tuple[int, list[tuple[int, ...]]]]:
    """The iterations of every loop of `value_and_grad`, and the shapes of what it is given."""
    shape = jax.ShapeDtypeStruct
    params = {
        "embed": shape((D, D), jnp.float32),
        "layers": shape((num_layers, D, D), jnp.float32),
        "head": shape((D,), jnp.float32),
    }
    batch = shape((MICROBATCHES * ROWS, D), jnp.float32)
    closed = jax.make_jaxpr(pipe.value_and_grad)(pipe.shapes(params), batch)

    def scans(jaxpr: Any) -> Iterator[tuple[int, list[tuple[int, ...]]]]:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "scan":
                yield eqn.params["length"], [v.aval.shape for v in eqn.invars]
            for inner in jaxprs_in_params(eqn.params):
                yield from scans(inner)

    return list(scans(closed.jaxpr))


@pytest.mark.parametrize("name", WHOLE)
def test_an_engine_counts_the_entries_and_ticks_that_its_program_has(name: str):
    pipe, plan = pipeline(name)
    buffers = pipe.engine.buffers(plan)
    assert len(buffers) == RANKS and len({*buffers}) == 1
    scans = loops(pipe, pipe.schedule.num_stages)
    shapes = {shape for _, shapes in scans for shape in shapes if shape[-2:] == (ROWS, D)}
    # A stage stores its input, of one piece of rows; I leaves W the cotangent of a product.
    assert (buffers[0].residuals, 1, ROWS, D) in shapes
    if FAMILIES[name].splits_backward:
        assert (buffers[0].wgrad_residuals, ROWS, D) in shapes
    lengths = [length for length, _ in scans]
    if pipe.ticks is not None:
        ticks = lock_step.num_ticks(pipe.ticks)
        if buffers[0].forwards_first:  # a loop of forwards and one of backwards
            half = MICROBATCHES * pipe.schedule.num_stages // RANKS + RANKS - 1
            assert lengths.count(half) == 2 and 2 * half - 1 <= ticks <= 2 * half
        else:
            assert ticks in lengths
    else:
        both = makespan(pipe.engine.timeline(plan, Costs(1.0, 0.5, 0.5)))
        assert lengths.count(round(both / 2)) == 2  # of forwards, and of backwards


@pytest.mark.parametrize("name", WHOLE)
def test_closed_forms_are_near_what_programs_have(name: str):
    family = FAMILIES[name]
    pipe, plan = pipeline(name)
    exact = pipe.engine.buffers(plan)[0]
    counts = StepCounts(RANKS, plan.layout.num_repeats, MICROBATCHES, None)
    closed = pipe.engine.expected_buffers(name, counts)
    if family.is_live_exact or pipe.engine.own_schedule:
        assert closed.residuals == exact.residuals
    else:
        assert closed.residuals >= exact.residuals
    assert abs(closed.activations - exact.activations) <= 2
    assert (closed.wgrad_residuals > 0) == (exact.wgrad_residuals > 0)


@pytest.mark.parametrize(("microbatches", "chunks"), [(4, 7), (4, 8), (8, 9), (6, 16), (3, 8)])
def test_closed_forms_of_two_sets_of_buffers(microbatches: int, chunks: int):
    mesh = jp.make_mesh({"stage": RANKS, "fsdp": 2}, devices=jax.devices()[: 2 * RANKS])
    options = {"microbatches": microbatches, "chunks": chunks, "gather": "repeat"}
    pipe = jp.pipeline(MODEL, schedule="looped_bfs", mesh=mesh, **options)
    exact = pipe.engine.buffers(pipe.plan(RANKS * chunks))[0]
    counts = StepCounts(RANKS, chunks, microbatches, "repeat")
    closed = pipe.engine.expected_buffers("looped_bfs", counts)
    assert closed.forwards_first and exact.forwards_first
    assert (
        closed.first_half == exact.first_half == (chunks // 2 * microbatches if chunks >= 8 else 0)
    )
    if microbatches >= RANKS:
        assert closed.residuals == exact.residuals
    else:
        assert exact.residuals <= closed.residuals < exact.residuals + RANKS


@pytest.mark.parametrize("chunks", [2, 8])
def test_a_delay_costs_entries_and_ticks_and_many_repeats_two_sets_of_buffers(chunks: int):
    for delay in (False, True):
        pipe, plan = pipeline("circular", chunks=chunks, forwarding_delay=delay)
        entries = pipe.engine.buffers(plan)[0]
        scans = loops(pipe, chunks * RANKS)
        leads = {s[0] for _, shapes in scans for s in shapes if s[1:] == (1, ROWS, D)}
        assert {entries.first_half, entries.residuals - entries.first_half} - {0} <= leads
        ticks = MICROBATCHES * chunks + (1 + delay) * (RANKS - 1)
        assert entries.residuals == ticks
        both = makespan(pipe.engine.timeline(plan, Costs(1.0, 0.5, 0.5)))
        assert both == 2 * ticks


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_h1", "gpipe"])
def test_programs_of_ranks_store_at_most_what_ticks_store(name: str):
    (pipe, plan), (ticked, plan_of_ticks) = pipeline(name, engine="mpmd"), pipeline(name)
    in_ticks = ticked.engine.buffers(plan_of_ticks)[0]
    by_rank = pipe.engine.buffers(plan)
    assert all(buffers.residuals <= in_ticks.residuals for buffers in by_rank)
    assert all(buffers.wgrad_residuals <= in_ticks.wgrad_residuals for buffers in by_rank)


_GIVEN = {"model_name": "llama2-7b", "ici_pipeline_parallelism": 2, "ici_data_parallelism": 2}
_GIVEN |= {"num_pipeline_microbatches": 8, "remat_policy": "full"}
# Options that a plan would choose.
_GIVEN |= {"shard_optimizer_over_data": False, "pipeline_vocab_parallel": False}
_1F1B = {"pipeline_engine": "scheduled", "pipeline_schedule": "interleaved_1f1b"}
_1F1B |= {"num_pipeline_repeats": 4, "set_remat_policy_on_layers_per_stage": False}
_CIRCULAR = {"pipeline_engine": "circular", "num_pipeline_repeats": 4}
_SHARDED = {"ici_fsdp_parallelism": 2, "ici_data_parallelism": 1}


def answer(keys: dict[str, Any]) -> tuple[float, float]:
    best = jp.plan(_GIVEN | keys, "v5p-8", 48, 2048).best
    return best.memory.total, best.time.seconds


# Of each key: the layout, the key, and whether memory and time of the plan change.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[bool, bool]]] = {
    "delay": (_CIRCULAR, {"pipeline_delay_activation_forwarding": True}, (True, True)),
    "ZeRO-1": (_CIRCULAR, {"shard_optimizer_over_data": True}, (True, False)),
    "ZeRO-1 without a pipeline": (
        {"pipeline_engine": "none", "ici_pipeline_parallelism": 1, "ici_fsdp_parallelism": 2}
        | {"num_pipeline_microbatches": 4},
        {"shard_optimizer_over_data": True},
        (True, False),
    ),
    "vocabulary": (_1F1B, {"pipeline_vocab_parallel": True}, (False, True)),
    "layers of a stage": (
        {"pipeline_engine": "circular", "num_layers_per_pipeline_stage": 2},
        {"num_layers_per_pipeline_stage": 4},
        (True, True),
    ),
    "per repeat": (
        _CIRCULAR | _SHARDED | {"pipeline_fsdp_ag_once": True},
        {"pipeline_fsdp_ag_once": False, "pipeline_fsdp_ag_per_repeat": True},
        (True, True),
    ),
    "custom": (_CIRCULAR, {"remat_policy": "custom", "out_proj": "device"}, (True, True)),
    "calls": (_1F1B, {"gradient_accumulation_steps": 3}, (True, True)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_key_that_changes_the_program_changes_the_plan(name: str):
    layout, key, changes = CHANGES[name]
    before, after = answer(layout), answer(layout | key)
    assert (before[0] != after[0], before[1] != after[1]) == changes


@pytest.mark.parametrize("engine", ["circular", "scheduled"])
def test_a_delay_is_planned_for_the_engine_that_has_it(engine: str):
    key = {"pipeline_engine": engine, "pipeline_delay_activation_forwarding": True}
    if engine == "circular":
        assert answer(key) != answer({"pipeline_engine": engine})
    else:
        with pytest.raises(ValueError, match="does not read `pipeline_delay"):
            answer(key)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ({"remat_policy": "minimal_offloaded"}, "offloads query_proj, .* inputs of layers alone"),
        ({"remat_policy": "qkv_proj_offloaded"}, "offloads query_proj, key_proj, value_proj"),
        ({"remat_policy": "custom", "mlpwi_0": "offload"}, "offloads mlpwi_0 to the host"),
        ({"quantization": "fp8"}, "`quantization` is 'fp8', and the planner knows neither"),
    ],
)
def test_keys_that_cannot_be_counted_are_refused(key: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        answer(key)


def test_saved_inputs_of_layers_are_what_the_compiler_has_more_of():
    # libtpu 0.0.48.1: peaks of 34,173.2 and 31,606.3 MB with `decoder_layer_input` on the device
    # and computed again, 2 ranks of 2 repeats of 4 layers, 8 microbatches.
    keys = _CIRCULAR | _SHARDED | {"base_num_decoder_layers": 16, "remat_policy": "custom"}
    keys |= {"num_pipeline_repeats": 2, "num_layers_per_pipeline_stage": 4}
    keys |= {"set_remat_policy_on_layers_per_stage": False}
    saved, again = (answer(keys | {"decoder_layer_input": at})[0] for at in ("device", "remat"))
    assert saved - again == pytest.approx((34_173.2 - 31_606.3) * 1e6, abs=0.1e6)


def test_the_backward_of_a_tpus_attention_has_as_many_products_as_its_kernels():
    rows = jax.ShapeDtypeStruct((1, 128, 1, 128), jnp.float32)
    attend = splash_attention(DEFAULT_RULES)
    with jax.set_mesh(jp.make_mesh({"stage": 1}, devices=jax.devices()[:1])):
        traced = jax.make_jaxpr(
            lambda q, k, v, dy: jax.vjp(lambda *qkv: attend(*qkv, None), q, k, v)[1](dy)
        )(rows, rows, rows, rows)
    (layer,) = make_request({"model_name": "llama2-7b"}, parse_devices("v5p-8")).work.layers
    assert layer.attention is not None
    assert products_of_kernels(traced.jaxpr) == 2 + layer.attention.backward_products


def products_of_kernels(jaxpr: Any, *, inside: bool = False) -> int:
    found = 0
    for eqn in jaxpr.eqns:
        kernel = inside or eqn.primitive.name == "pallas_call"
        found += inside and eqn.primitive.name == "dot_general"
        found += sum(products_of_kernels(j, inside=kernel) for j in jaxprs_in_params(eqn.params))
    return found
