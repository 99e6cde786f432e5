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
from ...autodiff import StagedModel
from ...data.batches._batches import FiniteBatches
from ..plan._from_config import import_flax_decoder
from ..plan._model import build_model
from ..plan._pipeline_plan import pipeline_plan
from ..plan._setup import Setup, batch_shardings, compiler_options, weight_shardings
from ._gradient_accumulation import gradient_accumulation
from ._mpmd import make_mpmd_eval_step
from ._state import TrainState
from ._step import of_slices, shard_batch_of_step, with_layer_mask

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
        make_value(setup),
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


def _linen_value(setup: Setup, model: StagedModel) -> Callable:
    flax_decoder = import_flax_decoder()
    return flax_decoder.linen_value(flax_decoder.make_flax_decoder(setup, model))


def _nnx_value(setup: Setup, model: StagedModel) -> Callable:
    flax_decoder = import_flax_decoder()
    return flax_decoder.nnx_value(flax_decoder.make_flax_decoder(setup, model))


def make_value(setup: Setup) -> Callable[..., Any]:
    """Returns the forwards of a run's engine, or of the Flax front end whose modules run in it.

    Args:
        setup: The run.

    Returns:
        `(weights, batch_inputs, keys) -> (loss, metrics)`.
    """
    model = build_model(setup)
    front_ends = {False: _linen_value, True: _nnx_value}
    if setup.config.enable_nnx is not None:
        return front_ends[setup.config.enable_nnx](setup, model)
    return of_slices(setup, partial(setup.config.engine.value, pipeline_plan(setup), model))
