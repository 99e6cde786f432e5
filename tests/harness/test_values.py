"""What every engine computes forward only is the value of the unpipelined program."""

import contextlib
import functools
from typing import Any

import jax
import pytest

from harness import contract, flax_decoder
from harness.contract import (
    Case,
    Row,
    assert_close,
    gather_of,
    mesh_of,
    parameters,
    placed,
    slow,
)
from jaxpipe import spmd
from jaxpipe.autodiff import unpipelined
from jaxpipe.schedules import language, lock_step
from jaxpipe.spmd import circular_engine, scheduled_engine


def value_of(row: Row, case: Case) -> Any:
    """(loss, metrics) by the row's engine."""
    if row.engine in ("linen", "nnx"):
        value = getattr(flax_decoder, f"{row.engine}_value")
        return contract.flax(value, row, case, derive=lambda value: value)
    mesh = mesh_of(row)
    how: dict[str, Any] = {
        "mesh": mesh,
        "gather": gather_of(row, case.axes["stages"], stacked=2),
        "boundary_gather": gather_of(row, {name: case.axes[name] for name in ("embed", "head")}),
    }
    how["options"] = contract.options_of(row)
    weights, keys = placed(case, mesh), case.keys
    if row.engine == "circular":
        run = functools.partial(circular_engine.circular_value, case.model, **how)
    else:
        schedule = contract.ticks_of(row).schedule
        ticks = lock_step.to_lock_step(language.forward_only(schedule))
        how["ticks"] = ticks
        run = functools.partial(scheduled_engine.scheduled_value, case.model, **how)
        stages, keys = (spmd.to_ranks(_flat(x), schedule) for x in (weights["stages"], keys))
        weights = weights | {"stages": stages}
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        return jax.jit(run)(weights, case.batch_inputs, keys)


def _flat(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


circular = functools.partial(Row, "circular")
scheduled = functools.partial(Row, "scheduled")
FSDP: Any = (("fsdp", 2),)
MANUAL = ("data", "fsdp")


def rows() -> list[Row]:
    in_slow_job = [
        circular("llama", 2, 3, 4, axes=FSDP, gather="repeat", batch_axes=MANUAL, packed=True),
        circular("llama", 4, 1, 4, axes=FSDP, gather="once", explicit=True, batch_axes=MANUAL),
        circular("deepseek", 2, 2, 4, axes=(("expert", 2), ("fsdp", 2)), packed=True),
        circular("llama", 2, 2, 4, axes=FSDP, vocab_parallel=True, packed=True),
        scheduled("llama", 3, 1, 6, axes=FSDP, schedule="zero_bubble_h1", gather="once"),
        scheduled("llama", 2, 2, 4, axes=FSDP, schedule="interleaved_1f1b", vocab_parallel=True,
                  gather="repeat", batch_axes=MANUAL, packed=True),
        scheduled("llama", 4, 2, 8, axes=(), schedule="dualpipev", packed=True),
        scheduled("llama", 4, 1, 8, axes=FSDP, schedule="dualpipe", vocab_parallel=True),
        scheduled("deepseek", 2, 1, 4, axes=FSDP, schedule="gpipe", packed=True),
        Row("linen", "llama", 2, 2, 4, axes=FSDP, packed=True, batch_axes=MANUAL),
        Row("nnx", "deepseek", 2, 1, 4, axes=FSDP, packed=True),
    ]  # fmt: skip
    return [
        circular("mlp", 3, 2, 6, axes=(), delay=True, dropout=0.1, tied=True),
        scheduled("mlp", 2, 2, 4, axes=(), schedule="zbv", dropout=0.1, tied=True),
        *slow(in_slow_job),
    ]


def rows_of_ranks() -> list[Row]:
    """Programs of every rank."""
    row = functools.partial(Row, "mpmd", axes=FSDP)
    in_slow_job = [
        row("deepseek", 2, 2, 4, schedule="interleaved_1f1b", packed=True),
        row("llama", 3, 1, 6, schedule="zero_bubble_h1", dropout=0.1),
        row("mlp", 4, 1, 8, schedule="dualpipe", dropout=0.1, tied=True),
    ]
    first = row("mlp", 2, 2, 4, axes=(), schedule="zbv", dropout=0.1, tied=True)
    return [first, *slow(in_slow_job)]


def check_value(row: Row, found: Any) -> None:
    (loss, metrics), (true, true_metrics) = found, contract.reference(contract.plain(row))[0]
    assert_close(loss, true, "loss")
    assert metrics.keys() == true_metrics.keys()
    for name in metrics:
        assert_close(metrics[name], true_metrics[name], f"metrics[{name!r}]")


@pytest.mark.parametrize("row", parameters(rows()))
def test_a_value_alone_is_that_beside_gradients(row: Row):
    check_value(row, value_of(row, contract.make_case(row)))


def test_so_is_that_of_the_reference():
    row = circular("mlp", 3, 2, 6, dropout=0.1, tied=True)
    case = contract.make_case(row)
    flat = case.weights | {"stages": _flat(case.weights["stages"])}
    run = functools.partial(unpipelined.value, case.model)
    check_value(row, jax.jit(run)(flat, case.batch_inputs, _flat(case.keys)))


@pytest.mark.parametrize("row", parameters(rows_of_ranks()))
def test_programs_of_every_rank_run_forwards_alone(row: Row):
    case, schedule = contract.make_case(row), contract.schedule_of(row)
    check_value(row, contract.mpmd_result(row, case, schedule, value_alone=True))
