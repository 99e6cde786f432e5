"""Weights that a run leaves out of weight decay, by name."""

import jax
import jax.numpy as jnp
import pytest

from jaxpipe.models.weights import weight_shapes
from jaxpipe.train.optim import weight_name
from jaxpipe.train.plan import make_optimizer, user_tree

from .runs import DEEPSEEK, NONE, Settings, setup_of

PIPELINES: list[Settings] = [
    NONE,
    {"ici_pipeline_parallelism": 2},
    {"ici_pipeline_parallelism": 2, "pipeline_engine": "mpmd"},
]


def decaying(settings: Settings) -> set[str]:
    """Names of weights that an update without a gradient changes."""
    setup = setup_of(settings.get("ici_pipeline_parallelism", 1), settings)
    shapes = weight_shapes(user_tree(setup.state))
    weights = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)
    optimizer = make_optimizer(setup.state)
    nothing = jax.tree.map(jnp.zeros_like, weights)
    updates, _ = optimizer.update(nothing, optimizer.init(weights), weights)
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    names = {weight_name(path) for path, update in leaves if jnp.any(update != 0)}
    return {name.replace("layers.", "stages.") for name in names}  # as a run names them


@pytest.mark.parametrize("engine", PIPELINES, ids=["none", "circular", "mpmd"])
def test_what_is_excluded_does_not_decay(engine: Settings):
    of_attention = {f"stages.attention.{name}" for name in ("query", "key", "value", "out")}
    of_mlp = {f"stages.mlp.{name}" for name in ("gate", "up", "down")}
    assert decaying(engine) == {"embed.table", *of_attention, *of_mlp}
    excluded = {"weight_decay_exclude": (r"^embed\.", r"attention\.(query|key)$")}
    left = {"stages.attention.value", "stages.attention.out"}
    assert decaying(engine | excluded) == left | of_mlp


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("mlp.query", r"'mlp.query', which finds none of the weights embed\.layers\.attention\."),
        ("(", r"'\(', which is no regular expression"),
        ("router.bias", "finds none of the weights"),  # no loss trains it, and it never decays
    ],
)
def test_expressions_that_find_nothing_are_refused(expression: str, message: str):
    with pytest.raises(ValueError, match=f"`weight_decay_exclude` has .*{message}"):
        setup_of(1, NONE | DEEPSEEK | {"weight_decay_exclude": expression, "routed_bias": True})
