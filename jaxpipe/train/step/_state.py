"""A train state without its numbers: shapes, logical axes, shardings, and its optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from ... import models, sharding
from ..optim._decay import without_excluded
from ..optim._optimizer import adamw, decay_mask, learning_rate_schedule
from ..optim._router_bias import without_router_biases
from ..plan._fsdp import optimizer_rules
from ..plan._setup import STACKED, Setup

State = dict[str, Any]
"""`weights`, `optimizer` and `step`, the number of steps done."""


def make_optimizer(setup: Setup) -> optax.GradientTransformation:
    """AdamW; norms' scales do not decay, nor what the config leaves out."""
    config = setup.config
    mask = decay_mask(models.shapes(trained(setup)), _stacked_dims(setup))
    return adamw(
        make_schedule(setup),
        b1=config.adam_b1,
        b2=config.adam_b2,
        eps=config.adam_eps,
        weight_decay=config.adam_weight_decay,
        decay_mask=without_excluded(mask, config.weight_decay_exclude),
    )


def trained(setup: Setup) -> PyTree:
    """The abstract weights that the optimizer sees."""
    return without_router_biases(setup.weight_tree)


def _stacked_dims(setup: Setup) -> PyTree:
    """How many leading dims of the weights only stack layers."""
    ends = {name: dict.fromkeys(setup.weight_tree[name], 0) for name in ("embed", "head")}
    for end in ends.values():
        end |= {"layers": 1} if "layers" in end else {}
    return ends | {"stages": 1 if setup.stages_apart else len(STACKED)}


def make_schedule(setup: Setup) -> optax.Schedule:
    """The learning rate by step."""
    config = setup.config
    num_steps = config.learning_rate_schedule_steps
    return learning_rate_schedule(
        config.learning_rate,
        num_steps=config.steps if num_steps == -1 else num_steps,
        warmup_fraction=config.warmup_steps_fraction,
        final_fraction=config.learning_rate_final_fraction,
        shape=config.learning_rate_schedule,
    )


def state_shapes(setup: Setup) -> State:
    """`jax.ShapeDtypeStruct` for every leaf of a state."""
    weights = models.shapes(setup.weight_tree)
    optimizer = jax.eval_shape(make_optimizer(setup).init, models.shapes(trained(setup)))
    step = jax.ShapeDtypeStruct((), jnp.int32)
    return {"weights": weights, "optimizer": optimizer, "step": step}


def state_axes(setup: Setup) -> State:
    """Logical axes of every leaf: Adam's moments lie like their weights."""
    axes = models.logical_axes(setup.weight_tree)
    optimizer = optax.tree_utils.tree_map_params(
        make_optimizer(setup),
        lambda _, of_weight: of_weight,
        state_shapes(setup)["optimizer"],
        models.logical_axes(trained(setup)),
        transform_non_params=lambda _: (),
    )
    return {"weights": axes, "optimizer": optimizer, "step": ()}


def state_shardings(setup: Setup) -> State:
    """A sharding for every leaf of a state."""
    shapes, axes, rules = state_shapes(setup), state_axes(setup), rules_of_state(setup)
    return {
        name: sharding.named_shardings(shapes[name], axes[name], setup.mesh, rules[name])
        for name in shapes
    }


def rules_of_state(setup: Setup) -> dict[str, sharding.Rules]:
    """The logical axis rules of every part of a state."""
    return {"weights": setup.rules, "optimizer": optimizer_rules(setup), "step": setup.rules}


def gradient_shardings(setup: Setup) -> PyTree:
    """A sharding for every gradient: they lie as the optimizer's state does."""
    tree = setup.weight_tree
    rules = optimizer_rules(setup)
    return sharding.named_shardings(
        models.shapes(tree), models.logical_axes(tree), setup.mesh, rules
    )
