"""A pipeline, compiled for its devices and for TPUs that are not there."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxpipe as jp
from jaxpipe._compat import jaxprs_in_params
from jaxpipe.devices import HARDWARE
from jaxpipe.xla import totals
from jaxpipe.xla.compiler_flags import LARGE_VMEM, CompilerFlag, _table

D, L, B = 8, 2, 8

MODEL = jp.Model(
    embed=lambda w, batch: batch @ w,
    layer=lambda w, x, batch: x + jnp.tanh(x @ w),
    loss=lambda w, x, batch: jnp.mean(x @ w),
)
PARAMS = {
    "embed": jax.ShapeDtypeStruct((D, D), jnp.float32),
    "layers": jax.ShapeDtypeStruct((L, D, D), jnp.float32),
    "head": jax.ShapeDtypeStruct((D,), jnp.float32),
}
BATCH = jax.ShapeDtypeStruct((B, D), jnp.float32)


def pipeline(num_ranks: int = 2, **options: Any) -> Any:
    mesh = jp.make_mesh({"stage": num_ranks}, devices=jax.devices()[:num_ranks])
    return jp.pipeline(MODEL, schedule="1f1b", mesh=mesh, microbatches=2, **options)


def test_a_report_has_memory_and_collectives():
    report = pipeline().compile(PARAMS, BATCH)
    assert report.num_devices == 2
    weights = 4 * (D * D + D * D + D)  # embedding, one of two layers, head
    assert weights <= report.memory.argument_bytes <= weights + 4 * B * D
    assert "collective-permute" in totals(report.audit)
    assert "memory per device" in str(report)
    assert "FLOPs" not in str(report)


def test_programs_of_each_rank_are_refused():
    with pytest.raises(ValueError, match="'mpmd', which has programs for each rank"):
        pipeline(engine="mpmd").compile(PARAMS, BATCH)


def test_programs_have_the_flags_of_the_table_unless_options_are_given(monkeypatch):
    option, seen, jit = "xla_cpu_enable_concurrency_optimized_scheduler", [], jax.jit

    def recording_jit(function, **options):
        seen.append(options.get("compiler_options"))
        return jit(function, **options)

    monkeypatch.setattr(CompilerFlag, "is_set", lambda row, _: row.option == option)
    monkeypatch.setattr(jax, "jit", recording_jit)
    for given in (None, {}, {"xla_cpu_enable_fast_math": False}):
        pipeline(compiler_options=given).jit(lambda x: x)
    assert seen == [{option: "False"}, None, {"xla_cpu_enable_fast_math": False}]


@pytest.mark.parametrize("engine", ["unpipelined", "scheduled", "circular"])
def test_products_add_to_sums_where_tiles_are_large(engine: str, monkeypatch):
    """Otherwise a barrier keeps XLA:TPU from it: the fusion would take longer than both."""

    def barriers(options: dict[str, str]) -> int:
        """Counts those of gradients of layers alone."""
        schedule = {"unpipelined": None, "scheduled": "1f1b", "circular": "circular"}[engine]
        mesh = jp.make_mesh({"data" if schedule is None else "stage": 2}, devices=jax.devices()[:2])
        arguments = {"schedule": schedule, "microbatches": 2, "compiler_options": options}
        pipe = jp.pipeline(MODEL, mesh=mesh, **arguments)
        half = jax.tree.map(lambda x: jnp.full(x.shape, 0.1, jnp.bfloat16), (PARAMS, BATCH))
        step = pipe.jit(pipe.value_and_grad)
        return count(step.trace(pipe.shard(half[0]), half[1]).jaxpr.jaxpr)

    def count(jaxpr: Any) -> int:
        found = sum(is_of_layer(eqn) for eqn in jaxpr.eqns)
        return found + sum(count(j) for eqn in jaxpr.eqns for j in jaxprs_in_params(eqn.params))

    def is_of_layer(eqn: Any) -> bool:
        if eqn.primitive.name != "optimization_barrier" or len(eqn.invars) != 1:
            return False
        aval = eqn.invars[0].aval
        return aval.dtype == jnp.bfloat16 and aval.shape[-2:] == (D, D)

    assert barriers({LARGE_VMEM: "65536"})  # of another kind of device
    monkeypatch.setattr(_table, "find_hardware", lambda _: HARDWARE["v5p"])
    assert barriers({}) and barriers({LARGE_VMEM: "16384"})
    assert not barriers({LARGE_VMEM: "65536"})


@pytest.mark.slow
def test_tpus_need_not_be_there():
    pytest.importorskip(
        "libtpu", reason='the TPU compiler is in libtpu: pip install "jaxpipe[aot]"'
    )
    with pytest.raises(ValueError, match=r"has 4 devices, and the mesh .*\(stage 2\) 2"):
        pipeline().compile(PARAMS, BATCH, "v5p:2x2x1")
    params = PARAMS | {"layers": jax.ShapeDtypeStruct((4, D, D), jnp.float32)}
    report = pipeline(4).compile(params, BATCH, "v5p:2x2x1")
    assert report.platform.startswith("TPU v5")
    assert "collective-permute" in totals(report.audit)
