"""Decides how a pipeline handles the variable collections of a Linen stage.

Weights (`params`, and the scales of FP8) are stacked, and so are all other collections that the
stage's `init` creates. A stage may read all of them. Values that a stage sows are returned once per
stage and microbatch. A stage must not update a collection for its next call: that would be the call
for the next microbatch, and microbatches are in different stages at the same time.
"""

from typing import Any

import jax
from flax.core import scope as flax_scope
from flax.linen import fp8_ops

OVERWRITTEN = (fp8_ops.OVERWRITE_WITH_GRADIENT,)
WEIGHTS = ("params", *OVERWRITTEN)
SOWN = ("intermediates", "metrics")


def is_sown(name: str, collection: Any) -> bool:
    """Returns whether a stage has only sown into a collection: `SOWN`, or tuples alone."""
    return name in SOWN or not jax.tree.leaves(_without_tuples(collection))


def _without_tuples(collection: Any) -> Any:
    return jax.tree.map(
        lambda x: None if isinstance(x, tuple) else x,
        collection,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def stored(variables: dict[str, Any]) -> dict[str, Any]:
    """Returns the variables that `init` created, without collections that the stage sows."""
    return {
        name: collection for name, collection in variables.items() if not is_sown(name, collection)
    }


def mutable_in_stage(mutable: Any, variables: dict[str, Any]) -> Any:
    """Returns `mutable`, the filter of collections that a stage may write, without weights."""
    for name in variables:
        if name not in WEIGHTS and flax_scope.in_filter(mutable, name):
            raise ValueError(_cannot_flow(name))
    return flax_scope.subtract_filters(mutable, list(WEIGHTS))


def check_sown(new: dict[str, Any]) -> None:
    """Raises a `ValueError` if a stage's call created a collection by other means than `sow`."""
    for name, collection in new.items():
        if not is_sown(name, collection):
            raise ValueError(_cannot_flow(name))


NOT_CARRIED = (
    "A stage's call would leave values in it for its next call. In a pipeline that would be the "
    "next microbatch, which other stages already work on. Let the stage only read it (running "
    "statistics: `nn.BatchNorm(use_running_average=True)`), and leave its collection out of "
    "`mutable`; if it holds what stages report, sow it with the default `reduce_fn`, or into "
    "'intermediates' or 'metrics'."
)


def _cannot_flow(name: str) -> str:
    return f"The collection {name!r} is mutable. {NOT_CARRIED}"
