"""Evaluation: the loss of a set of batches, computed by the run's own engine, forward only.

Nothing is differentiated, no residuals are kept, and there is no dropout.
"""

import math
import time
from collections.abc import Callable

import jax

from ...data.batches import FiniteBatches
from ..config._config import Config
from ..plan._setup import StepPlan
from ._shard_batch import shard_batch_of_step
from ._state import TrainState
from ._step import StepMetrics, make_eval_step

EvalMetrics = dict[str, float]

Evaluate = Callable[[TrainState], EvalMetrics]

AUXILIARY_LOSSES = ("load_balance_loss", "load_balance_loss_after", "z_loss")
"""Metrics of a batch that are terms of its loss beside the cross entropy."""


def make_evaluate(
    plan: StepPlan,
    config: Config,
    batches: FiniteBatches | None,
    on_batch_done: Callable[[], None] = lambda: None,
) -> Evaluate | None:
    """Builds the evaluation of a run.

    Its metrics are `eval_loss`, the cross entropy in nats of all target tokens over their total
    weight, however they are divided into batches; its `eval_perplexity`; the other metrics of a
    batch, weighted alike, among them the auxiliary losses that training adds; and `eval_seconds`.
    """
    if not config.eval_interval:
        return None
    count = config.eval_steps
    if not batches:
        data_key = "eval_data_sources" if config.dataset_type == "mixture" else "eval_files"
        raise ValueError(
            f"`eval_interval` is {config.eval_interval}, and there is nothing to evaluate on. Give "
            f"`{data_key}` or `eval_split_fraction`, or leave it at 0."
        )
    if count > len(batches):
        raise ValueError(
            f"`eval_steps` is {count}, and there are {len(batches)} batches to evaluate on. Give "
            "at most that, or -1 for all of them."
        )
    eval_step = make_eval_step(plan)

    def evaluate(state: TrainState) -> EvalMetrics:
        started, mean = time.perf_counter(), _WeightedMean()
        for i in range(len(batches) if count == -1 else count):
            metrics = eval_step(state["weights"], shard_batch_of_step(plan.batch, batches, i))
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
        self._last: tuple[float, StepMetrics] = 0.0, {}

    def add(self, weight: float, values: StepMetrics) -> None:
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
