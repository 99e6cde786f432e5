"""A step beside its prediction, and its actions in a profile."""

import gzip
import itertools
import json
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxpipe import mpmd, schedules
from jaxpipe.mpmd import jaxpp, profiling
from jaxpipe.schedules import language


def compiled_step(schedule: Any) -> tuple[mpmd.Compiled, list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(schedule.num_stages, 8, 8)).astype(np.float32)
    xs = rng.normal(size=(4, 2, 8)).astype(np.float32)

    def loss(weights, x):
        for weight in weights:
            x = mpmd.mark_stage_end(jnp.tanh(x @ weight))
        return jnp.sum(x**2)

    def step(weights, xs):
        return mpmd.treduce(lambda x: jax.value_and_grad(loss)(weights, x), xs, schedule)

    mesh = mpmd.MpmdMesh(Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
    weights = list(numbers)
    return mpmd.mpmd_jit_with_loop(step, mesh).compile(weights, xs), weights, xs


def halves(steps: Iterable[language.ScheduleStep]) -> set[str]:
    """Actions, a B as its two halves: where a schedule splits some, all of its B run so."""
    actions = (str(action) for step in steps for action in language.actions_of(step))
    return {half for a in actions for half in ((a.replace("B", "I"), a.replace("B", "W")))}


@pytest.mark.parametrize("schedule", [jaxpp.Std1F1B(2), jaxpp.ZeroBubble(2), jaxpp.DualPipeV(4)])
def test_a_traced_step_computes_the_same_and_has_every_action_beside_its_prediction(schedule):
    compiled, weights, xs = compiled_step(schedule)
    expected = compiled(weights, xs)
    result, found = profiling.trace_step(compiled, weights, xs)
    jax.tree.map(np.testing.assert_array_equal, result, expected)

    events = json.loads(schedules.to_perfetto(found, microseconds=1e6))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {
        2 * rank + i: f"rank {rank}, {kind}"
        for rank in range(2)
        for i, kind in enumerate(("measured", "predicted"))
    }
    (of_step,) = compiled.lowered.schedules
    for process, name in names.items():
        found = [e for e in events if e["ph"] == "X" and e["pid"] == process]
        steps = [language.parse_step(e["name"]) for e in found]
        # Nothing is sent by the I of stage 0: if its W computes all, it has no program.
        may_be_empty = {f"0I{m}" for m in range(len(xs))}
        planned = halves(of_step.programs[int(name[5])])
        assert planned - may_be_empty <= halves(steps) <= planned
        assert all(e["dur"] > 0 for e in found if e["name"] not in may_be_empty)
        for one, other in itertools.pairwise(found):
            assert one["ts"] + one["dur"] <= other["ts"] * (1 + 1e-9)


def test_a_profile_has_every_action_by_name_and_rank(tmp_path):
    compiled, weights, xs = compiled_step(jaxpp.Std1F1B(2))
    expected = compiled(weights, xs)
    named = profiling.annotated(compiled)
    with jax.profiler.trace(tmp_path, create_perfetto_trace=True):
        result = jax.block_until_ready(named(weights, xs))
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    (file,) = tmp_path.rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    found = {event.get("name", "") for event in events}
    assert {f"fwd_0__{m} on rank 0" for m in range(4)} <= found
    assert {f"bwd_0__{m} on rank 0" for m in range(4)} <= found
    assert "rank 0 sends to rank 1" in found
