"""Plans of own models whose weights `tensor` divides, beside what XLA:TPU compiles."""

from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

import jaxpipe as jp
from planner.test_plan_own_memory import BATCH, functions


def specs(path: str, leaf: Any) -> P | None:
    stack = (None,) * (leaf.ndim - 2)
    if "'qkv'" in path or "'up'" in path:
        return P(*stack, "fsdp", "tensor")
    if "'out'" in path or "'down'" in path:
        return P(*stack, "tensor", "fsdp")
    return None


@pytest.fixture(autouse=True, scope="module")
def with_dtype_promotion():
    """Norms promote dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def plan(**how: Any) -> Any:
    model, params, example = functions(1024, 4096, 50_304, 1024, 12)
    given: dict[str, Any] = {"params": params, "example": example, "num_plans": 1}
    return jp.plan(model, "v5p-8", BATCH, **given, param_specs=specs, **how)


def test_products_are_divided_as_weights_are():
    work = plan(mesh={"fsdp": 2, "tensor": 2}, schedule=None).request.work.layers[0]
    splits = {(p.k, p.n): p.split for p in work.products}
    D, F = 1024, 4096
    assert splits[D, 3 * D] == splits[D, F] == "column"
    assert splits[F, D] == splits[D, D] == "row"
    assert {p.split for p in work.products if p.k not in (D, F)} == {"column"}  # of heads
    assert work.tensor_sums == 2


ALONE: dict[str, Any] = {"schedule": None, "microbatches": 1}
# GB and seconds by `plans.verify` with libtpu 0.0.48.1, and what is planned of each.
COMPILED: list[tuple[dict[str, Any], float, float, float, float]] = [
    (ALONE | {"mesh": {"fsdp": 2, "tensor": 2}, "layer_remat": "full"}, 15.31, 0.79, 0.304, 0.84),
    (ALONE | {"mesh": {"tensor": 4}, "layer_remat": "full"}, 23.29, 0.99, 0.381, 0.85),
    (ALONE | {"mesh": {"fsdp": 2, "tensor": 2}, "layer_remat": "none"}, 53.27, 0.94, 0.259, 0.98),
    (
        {"schedule": "1f1b", "microbatches": 4, "mesh": {"stage": 2, "tensor": 2}}
        | {"layer_remat": "full"},
        8.22,
        0.96,
        0.400,
        0.88,
    ),
]


@pytest.mark.parametrize(("how", "memory", "of_memory", "seconds", "of_seconds"), COMPILED)
def test_memory_and_time_beside_a_compiler(
    how: dict[str, Any], memory: float, of_memory: float, seconds: float, of_seconds: float
):
    best = plan(**how).best
    assert best.memory.total / 1e9 / memory == pytest.approx(of_memory, abs=0.03)
    assert best.time.seconds / seconds == pytest.approx(of_seconds, abs=0.03)


def test_a_mesh_with_tensor_needs_specs():
    model, params, example = functions(1024, 4096, 50_304, 1024, 12)
    given: dict[str, Any] = {"params": params, "example": example, "schedule": None}
    with pytest.raises(ValueError, match="2 devices along 'tensor', and `param_specs` divides no"):
        jp.plan(model, "v5p-8", BATCH, **given, mesh={"fsdp": 2, "tensor": 2})
