"""Evaluation: the loss of a set of batches, by the run's own engine and forward only.

Nothing is derived, nothing is kept for a backward, and there is no dropout.
"""

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jaxtyping import PyTree

from ... import mpmd, schedules, spmd
from ...autodiff import Model, unpipelined
from ...data import SomeBatches
from ..plan._from_config import flax_decoder
from ..plan._fsdp import gathers
from ..plan._model import build_model
from ..plan._setup import Setup, batch_shardings, options_of_steps, weights_shardings
from ._gradient_accumulation import in_calls
from ._mpmd import make_mpmd_eval_step
from ._state import State
from ._step import engine_name, place_step, present_layers

Values = Mapping[str, jax.Array | mpmd.MpmdArray]
Metrics = dict[str, float]

Evaluate = Callable[[State], Metrics]

AUXILIARY = ("load_balance_loss", "load_balance_loss_after", "z_loss")
"""Metrics of a batch that are terms of its loss beside the cross entropy."""


def make_evaluate(
    setup: Setup, batches: SomeBatches | None, go_on: Callable[[], None] = lambda: None
) -> Evaluate | None:
    """From a state to the metrics of an evaluation; None if the run has none.

    They are `eval_loss`, the cross entropy in nats of all target tokens over their total weight,
    however they lie in batches; its `eval_perplexity`; the other metrics of a batch, weighted
    alike, among them the losses that training adds; and `eval_seconds`.

    Args:
        setup: The run.
        batches: What it is evaluated on.
        go_on: Is called after each of them.

    Raises:
        ValueError: If there is nothing to evaluate on, or less than `eval_steps`.
    """
    config = setup.config
    if not config.eval_interval:
        return None
    count = config.eval_steps
    if not batches:
        files = "eval_data_sources" if config.dataset_type == "mixture" else "eval_files"
        raise ValueError(
            f"`eval_interval` is {config.eval_interval}, and there is nothing to evaluate on. Give "
            f"`{files}` or `eval_split_fraction`, or leave it at 0."
        )
    if count > len(batches):
        raise ValueError(
            f"`eval_steps` is {count}, and there are {len(batches)} batches to evaluate on. Give "
            "at most that, or -1 for all of them."
        )
    eval_step = make_eval_step(setup)

    def evaluate(state: State) -> Metrics:
        started, mean = time.perf_counter(), _Mean()
        for i in range(len(batches) if count == -1 else count):
            found = eval_step(state["weights"], place_step(setup, batches, i))
            mean.add(float(batches.num_targets(i)), found)
            go_on()
        found = _with_loss_alone(mean.close())
        found["perplexity"] = math.exp(min(found["loss"], 700.0))
        found["seconds"] = time.perf_counter() - started
        return {f"eval_{name}": value for name, value in found.items()}

    return evaluate


class _Mean:
    """Of values by name, weighted. It reads each while the next ones are computed."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weight = 0.0
        self._last: tuple[float, Values] = 0.0, {}

    def add(self, weight: float, values: Values) -> None:
        self._read()
        self._last = weight, values

    def close(self) -> Metrics:
        self._read()
        if not self._weight:
            raise ValueError("No token of the batches to evaluate on has a target.")
        return {name: value / self._weight for name, value in self._sums.items()}

    def _read(self) -> None:
        weight, values = self._last
        self._weight += weight
        for name, value in jax.device_get(values).items():
            self._sums[name] = self._sums.get(name, 0.0) + weight * float(value)


def _with_loss_alone(metrics: Metrics) -> Metrics:
    """The loss first, without what training adds to it."""
    added = sum(metrics.get(name, 0.0) for name in AUXILIARY)
    return {"loss": metrics.pop("loss") - added} | metrics


def make_eval_step(setup: Setup) -> Callable[[PyTree, PyTree], Values]:
    """`(weights, batch from place_batch) -> loss and metrics`. It compiles at its first call."""
    if setup.stages_apart:
        return make_mpmd_eval_step(setup)
    value = in_calls(VALUES[engine_name(setup)](setup, build_model(setup)), setup.num_calls)

    def step(weights: PyTree, batch: PyTree) -> Values:
        loss, metrics = value(weights, batch, present_layers(setup, ()))
        return {"loss": loss, **metrics}

    return jax.jit(
        step,
        in_shardings=(weights_shardings(setup), batch_shardings(setup)),
        compiler_options=options_of_steps(setup),
    )


def _none(setup: Setup, model: Model) -> Callable:
    del setup

    def value(weights, side, keys):
        # One repeat and one rank: dims 0 and 1 of the stages become one dim of stages.
        flat = weights | {"stages": jax.tree.map(lambda x: x[0], weights["stages"])}
        return unpipelined.value(model, flat, side, keys)

    return value


def _circular(setup: Setup, model: Model) -> Callable:
    config = setup.config
    gather, ends_gather = gathers(setup)
    return partial(
        spmd.circular_value,
        model,
        mesh=setup.mesh,
        delay=config.pipeline_delay_activation_forwarding,
        gather=gather,
        ends_gather=ends_gather,
        scan_repeats=config.scan_pipeline_repeats,
    )


def _scheduled(setup: Setup, model: Model) -> Callable:
    gather, ends_gather = gathers(setup)
    assert setup.schedule is not None
    return partial(
        spmd.scheduled_value,
        model,
        ticks=schedules.lock_step(schedules.forward_only(setup.schedule.schedule)),
        mesh=setup.mesh,
        gather=gather,
        ends_gather=ends_gather,
        share_head=setup.config.pipeline_share_head,
    )


def _linen(setup: Setup, model: Model) -> Callable:
    rim = flax_decoder()
    return rim.linen_value(rim.decoder_of(setup, model))


def _nnx(setup: Setup, model: Model) -> Callable:
    rim = flax_decoder()
    return rim.nnx_value(rim.decoder_of(setup, model))


VALUES: dict[str, Callable[[Setup, Model], Callable[..., Any]]] = {
    "none": _none,
    "circular": _circular,
    "scheduled": _scheduled,
    "linen": _linen,
    "nnx": _nnx,
}
