"""What becomes of the variable collections of a Linen layer.

Weights (`params`, and the scales of FP8) are stacked, and so is whatever else the layer's `init`
makes; both are read. What a layer sows comes out once per layer and microbatch. A collection that a
call would change, to be read by the next microbatch, cannot be carried: microbatches are in
different stages at the same time.
"""

from typing import Any

import jax
from flax.core import scope as flax_scope
from flax.linen import fp8_ops

OVERWRITTEN = (fp8_ops.OVERWRITE_WITH_GRADIENT,)
WEIGHTS = ("params", *OVERWRITTEN)
SOWN = ("intermediates", "metrics")


def is_sown(name: str, collection: Any) -> bool:
    """Whether a layer has only sown into it: by its name, or since all its variables are tuples."""
    return name in SOWN or not jax.tree.leaves(_without_tuples(collection))


def _without_tuples(collection: Any) -> Any:
    return jax.tree.map(
        lambda x: None if isinstance(x, tuple) else x,
        collection,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def stored(variables: dict[str, Any]) -> dict[str, Any]:
    """What `init` made, without what layers sow in it."""
    return {name: of for name, of in variables.items() if not is_sown(name, of)}


def mutable_in_layer(mutable: Any, variables: dict[str, Any]) -> Any:
    """The filter of collections that a layer may write, for a pipeline with the filter `mutable`.

    Raises:
        ValueError: If `mutable` has a collection of `variables` that is not of weights.
    """
    for name in variables:
        if name not in WEIGHTS and flax_scope.in_filter(mutable, name):
            raise ValueError(_cannot_flow(name))
    return flax_scope.subtract_filters(mutable, list(WEIGHTS))


def check_sown(new: dict[str, Any]) -> None:
    """Raises a `ValueError` if a layer's call made a collection by other means than `sow`."""
    for name, collection in new.items():
        if not is_sown(name, collection):
            raise ValueError(_cannot_flow(name))


NOT_CARRIED = (
    "A layer's call would leave values in it for its next call. In a pipeline that would be the "
    "next microbatch, which other stages already work on. Let the layer only read it (running "
    "statistics: `nn.BatchNorm(use_running_average=True)`), and leave its collection out of "
    "`mutable`; if it holds what layers report, sow it with the default `reduce_fn`, or into "
    "'intermediates' or 'metrics'."
)


def _cannot_flow(name: str) -> str:
    return f"The collection {name!r} is mutable. {NOT_CARRIED}"
