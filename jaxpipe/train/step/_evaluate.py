"""Evaluation: the loss of a set of batches, computed by the run's own engine, forward only.

Nothing is differentiated, no residuals are kept, and there is no dropout.
"""

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jaxtyping import PyTree

from ... import mpmd
from ...autodiff import StagedModel, unpipelined
from ...data.batches._batches import FiniteBatches
from ...schedules import language, lock_step
from ...spmd import circular_engine, scheduled_engine
from ..plan._from_config import import_flax_decoder
from ..plan._fsdp import weight_gathers
from ..plan._model import build_model
from ..plan._setup import Setup, batch_shardings, compiler_options, weight_shardings
from ._gradient_accumulation import gradient_accumulation
from ._mpmd import make_mpmd_eval_step
from ._state import TrainState
from ._step import engine_name, shard_batch_of_step, with_layer_mask

BatchMetrics = Mapping[str, jax.Array | mpmd.MpmdArray]
EvalMetrics = dict[str, float]

Evaluate = Callable[[TrainState], EvalMetrics]

AUXILIARY_LOSSES = ("load_balance_loss", "load_balance_loss_after", "z_loss")
"""Metrics of a batch that are terms of its loss beside the cross entropy."""


def make_evaluate(
    setup: Setup, batches: FiniteBatches | None, on_batch_done: Callable[[], None] = lambda: None
) -> Evaluate | None:
    """Builds the evaluation of a run.

    Its metrics are `eval_loss`, the cross entropy in nats of all target tokens over their total
    weight, however they are divided into batches; its `eval_perplexity`; the other metrics of a
    batch, weighted alike, among them the auxiliary losses that training adds; and `eval_seconds`.

    Args:
        setup: The run.
        batches: The batches to evaluate on.
        on_batch_done: Called after every batch.

    Returns:
        From a train state to the metrics; None if the run has no evaluation.

    Raises:
        ValueError: If there are no batches, or fewer than `eval_steps`.
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

    def evaluate(state: TrainState) -> EvalMetrics:
        started, mean = time.perf_counter(), _WeightedMean()
        for i in range(len(batches) if count == -1 else count):
            metrics = eval_step(state["weights"], shard_batch_of_step(setup, batches, i))
            mean.add(float(batches.num_targets(i)), metrics)
            on_batch_done()
        metrics = _separate_cross_entropy(mean.result())
        metrics["perplexity"] = math.exp(min(metrics["loss"], 700.0))
        metrics["seconds"] = time.perf_counter() - started
        return {f"eval_{name}": value for name, value in metrics.items()}

    return evaluate


class _WeightedMean:
    """The weighted mean of metrics by name.

    The metrics of a batch are read while the next batch is computed.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weight = 0.0
        self._last: tuple[float, BatchMetrics] = 0.0, {}

    def add(self, weight: float, values: BatchMetrics) -> None:
        self._read()
        self._last = weight, values

    def result(self) -> EvalMetrics:
        self._read()
        if not self._weight:
            raise ValueError("No token of the batches to evaluate on has a target.")
        return {name: value / self._weight for name, value in self._sums.items()}

    def _read(self) -> None:
        weight, values = self._last
        self._weight += weight
        for name, value in jax.device_get(values).items():
            self._sums[name] = self._sums.get(name, 0.0) + weight * float(value)


def _separate_cross_entropy(metrics: EvalMetrics) -> EvalMetrics:
    """Subtracts auxiliary losses from the loss, and puts it first."""
    added = sum(metrics.get(name, 0.0) for name in AUXILIARY_LOSSES)
    return {"loss": metrics.pop("loss") - added} | metrics


def make_eval_step(setup: Setup) -> Callable[[PyTree, PyTree], BatchMetrics]:
    """Builds the evaluation of one batch; it compiles at its first call.

    Args:
        setup: The run.

    Returns:
        `(weights, batch from shard_batch) -> loss and metrics`.
    """
    if setup.per_stage_state:
        return make_mpmd_eval_step(setup)
    value = gradient_accumulation(
        VALUE_BUILDERS[engine_name(setup)](setup, build_model(setup)),
        setup.gradient_accumulation_steps,
    )

    def step(weights: PyTree, batch: PyTree) -> BatchMetrics:
        loss, metrics = value(weights, batch, with_layer_mask(setup, ()))
        return {"loss": loss, **metrics}

    return jax.jit(
        step,
        in_shardings=(weight_shardings(setup), batch_shardings(setup)),
        compiler_options=compiler_options(setup),
    )


def _unpipelined_value(setup: Setup, model: StagedModel) -> Callable:
    del setup

    def value(weights, batch_inputs, keys):
        # One repeat and one rank: dims 0 and 1 of the stages become one dim of stages.
        flat = weights | {"stages": jax.tree.map(lambda x: x[0], weights["stages"])}
        return unpipelined.value(model, flat, batch_inputs, keys)

    return value


def _circular_value(setup: Setup, model: StagedModel) -> Callable:
    config = setup.config
    gather, boundary_gather = weight_gathers(setup)
    return partial(
        circular_engine.circular_value,
        model,
        mesh=setup.mesh,
        delay=config.pipeline_delay_activation_forwarding,
        gather=gather,
        boundary_gather=boundary_gather,
        scan_repeats=config.scan_pipeline_repeats,
        scan_ticks=config.scan_pipeline_iterations,
    )


def _scheduled_value(setup: Setup, model: StagedModel) -> Callable:
    gather, boundary_gather = weight_gathers(setup)
    assert setup.schedule_selection is not None
    return partial(
        scheduled_engine.scheduled_value,
        model,
        ticks=lock_step.to_lock_step(language.forward_only(setup.schedule_selection.schedule)),
        mesh=setup.mesh,
        gather=gather,
        boundary_gather=boundary_gather,
        vocab_parallel=setup.config.pipeline_vocab_parallel,
    )


def _linen_value(setup: Setup, model: StagedModel) -> Callable:
    flax_decoder = import_flax_decoder()
    return flax_decoder.linen_value(flax_decoder.make_flax_decoder(setup, model))


def _nnx_value(setup: Setup, model: StagedModel) -> Callable:
    flax_decoder = import_flax_decoder()
    return flax_decoder.nnx_value(flax_decoder.make_flax_decoder(setup, model))


VALUE_BUILDERS: dict[str, Callable[[Setup, StagedModel], Callable[..., Any]]] = {
    "none": _unpipelined_value,
    "circular": _circular_value,
    "scheduled": _scheduled_value,
    "linen": _linen_value,
    "nnx": _nnx_value,
}
