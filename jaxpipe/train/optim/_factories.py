"""The optimizer of a run by name: a factory of optax with its arguments, or a function of the user.

A factory is given the run's learning rate of every step. If it takes a weight decay with a mask, it
is given those of the run too. All other arguments are the user's.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache, partial
from types import FunctionType
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from ..._input import clause, import_function, short_repr

_REFUSED = {
    "dpsgd": "it needs the gradient of every row",
    "lbfgs": "its line search computes the loss inside of an update",
    "momo": "it needs the loss inside of an update",
    "momo_adam": "it needs the loss inside of an update",
    "optimistic_adam": "it takes no schedule of learning rates: name optimistic_adam_v2",
    "polyak_sgd": "it needs the loss inside of an update",
    "rprop": "it takes no schedule of learning rates",
    "schedule_free": "it needs an optimizer inside: name schedule_free_adamw or schedule_free_sgd",
    "sm3": "it takes no schedule of learning rates",
    "sophia": "it differentiates the loss inside of an update",
}
"""Factories of optax that cannot run on gradients and a schedule alone, and the reason."""

_REFUSED_ARGUMENTS = {
    ("muon", "adaptive"): "it would sum over all layers and experts: their matrices are one stack"
}
"""Arguments that cannot be given to factories of optax, and the reason."""

_OF_WHOLE_ARRAYS = frozenset({"adafactor", "fromage", "galore", "lamb", "lars", "novograd"})
"""Factories that compute with an array as a whole, such as its norm or its rows."""

_MASKS = ("mask", "weight_decay_mask")

_ADAM_KEYS = {"b1": "adam_b1", "b2": "adam_b2", "eps": "adam_eps"}
_MUON_KEYS = {name: name for name in ("adam_b1", "adam_b2", "adam_weight_decay")}
"""Arguments of adamw and muon that keys of a run give, with these keys."""

_MuonDimensions = optax.contrib.MuonDimensionNumbers

_INTERNAL = ("muon_weight_dimension_numbers", "adam_eps_root")
"""Arguments of muon that are no one's to give: dims are known, and its Adam is not used."""


@cache
def factories() -> dict[str, Callable[..., Any]]:
    """Returns the optimizers of optax that a run may name."""
    named: dict[str, Callable[..., Any]] = {}
    for module in (optax.contrib, optax):
        for name, value in vars(module).items():
            is_factory = isinstance(value, FunctionType | partial)  # nadamw is a partial
            is_factory &= not name.startswith(("_", "scale_by"))
            if is_factory and name not in _REFUSED and "learning_rate" in _parameters(value):
                named[name] = value
    return dict(sorted(named.items()))


def check_factory(name: str, arguments: Mapping[str, Any]) -> None:
    """Checks the name of an optimizer of optax and its arguments; a user's function is not read."""
    if ":" not in name:
        _check_arguments(name, factory_of(name), arguments)


def factory_of(name: str) -> Callable[..., Any]:
    """Returns the factory of optax with this name."""
    if name in _REFUSED:
        raise ValueError(
            f"`optimizer` is {name!r}, which cannot train a pipeline: {_REFUSED[name]}."
        )
    if name not in factories():
        near = get_close_matches(name[:80], factories(), n=1)
        raise ValueError(
            f"`optimizer` is {name!r}, which optax does not have."
            + (f" Did you mean {near[0]!r}?" if near else "")
            + f" Give one of {', '.join(factories())}, or `module:function` of your own."
        )
    return factories()[name]


def unread_keys(name: str, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the keys of a run that an optimizer does not read; imports a user's function."""
    read = {*_given_by_keys(name, _named(name)).values()}
    read |= {*_ADAM_KEYS.values()} if name == "muon" else set()
    if name == "adafactor" and not arguments.get("weight_decay_rate"):
        read.discard("weight_decay_exclude")  # nothing decays
    keys = (*_ADAM_KEYS.values(), "adam_weight_decay", "weight_decay_exclude")
    return tuple(key for key in keys if key not in read)


def averages_weights(name: str) -> bool:
    """Returns whether a model is an average of the weights of an optimizer of optax.

    Of a user's function it is not known.
    """
    return name.startswith("schedule_free")


def treats_arrays_as_wholes(name: str) -> bool:
    """Returns whether results depend on which layers are stacked in one array."""
    return ":" in name or name in _OF_WHOLE_ARRAYS


def build_optimizer(
    name: str,
    arguments: Mapping[str, Any],
    schedule_of: Callable[[float | None], optax.Schedule],
    *,
    adam: Mapping[str, float],
    weight_decay: float,
    decays: PyTree[bool],
    dimensions: PyTree,
) -> optax.GradientTransformation:
    """Builds the optimizer of a run.

    Args:
        name: A factory of optax, or `module:function`.
        arguments: Arguments of the factory.
        schedule_of: Returns the learning rate of every step from a peak; None is the run's peak.
        adam: `b1`, `b2` and `eps` of Adam.
        weight_decay: Factor of the decay of weights.
        decays: Whether a weight decays, in a tree like the weights.
        dimensions: The dims of a matrix of a layer, `optax.contrib.MuonDimensionNumbers`, in such a
            tree; False for other weights.

    Returns:
        The optimizer, for the tree of weights that `decays` is of.
    """
    factory = _named(name)
    _check_arguments(name, factory, arguments)
    keywords: dict[str, Any] = {"learning_rate": schedule_of(None)}
    if name == "adamw":
        keywords |= adam
    if _takes_weight_decay(factory):
        keywords["weight_decay"] = weight_decay
    keywords |= {mask: decays for mask in _MASKS if mask in _parameters(factory)}
    own = dict(arguments)
    if name == "muon":
        rate = schedule_of(own.pop("adam_learning_rate", None))
        rest = {**adam, "weight_decay": weight_decay, "mask": decays}
        rest["mu_dtype"] = own.get("mu_dtype")
        factory = partial(_muon, partial(optax.adamw, rate, **rest), dimensions)
    with refused_by_name(name, arguments, "built"):
        tx = factory(**keywords, **own)
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise ValueError(
            f"`optimizer` is {name!r}, which returned {type(tx).__name__} in place of an "
            "optimizer. Return one of optax, or what has its `init` and `update`."
        )
    return _with_standard_promotion(tx)


@contextmanager
def refused_by_name(name: str, arguments: Mapping[str, Any], done: str) -> Iterator[None]:
    """Names the optimizer and its arguments in errors of what is done with it."""
    try:
        yield
    except Exception as error:  # of the user's arguments, or of the user's function
        raise ValueError(
            f"`optimizer` {name!r} cannot be {done} with `optimizer_arguments` "
            f"{dict(arguments)}: {type(error).__name__}: {clause(error)}. Change the "
            "arguments."
        ) from error


def _muon(
    make_rest: Callable[[], optax.GradientTransformation], dimensions: PyTree, **arguments: Any
) -> optax.GradientTransformation:
    """Builds muon for matrices of layers, and another optimizer for all other weights.

    The Adam inside of `optax.contrib.muon` has Nesterov momentum, and decays all of its weights or
    none.
    """

    def map_dimensions(of: Callable[[Any], Any]) -> PyTree:
        return jax.tree.map(of, dimensions, is_leaf=lambda x: isinstance(x, _MuonDimensions))

    # None of a label would be a weight that is left out, as router biases are.
    labels = map_dimensions(lambda dims: "muon" if dims else "adamw")
    numbers = map_dimensions(lambda dims: dims or None)
    muon = optax.contrib.muon(**arguments, muon_weight_dimension_numbers=numbers)
    return optax.partition({"muon": muon, "adamw": make_rest()}, labels)


def _with_standard_promotion(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns an optimizer that may raise floats to integer counts; strict promotion refuses it."""

    def init(params: optax.Params) -> optax.OptState:
        with jax.numpy_dtype_promotion("standard"):
            return tx.init(params)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        with jax.numpy_dtype_promotion("standard"):
            return tx.update(updates, state, params)

    return optax.GradientTransformation(init, update)


def _parameters(factory: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the arguments of a factory."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(factory).parameters.values()
    return tuple(p.name for p in parameters if p.kind in kinds)


def _takes_weight_decay(factory: Callable[..., Any]) -> bool:
    """Returns whether a factory takes a weight decay and a mask of what decays."""
    names = _parameters(factory)
    return "weight_decay" in names and any(mask in names for mask in _MASKS)


def _given_by_keys(name: str, factory: Callable[..., Any]) -> dict[str, str]:
    """Returns the arguments of a factory that are given by keys of a run, with these keys."""
    key_of_argument = {"learning_rate": "learning_rate"}
    key_of_argument |= _ADAM_KEYS if name == "adamw" else {}
    key_of_argument |= _MUON_KEYS if name == "muon" else {}
    key_of_argument |= {"weight_decay": "adam_weight_decay"} if _takes_weight_decay(factory) else {}
    key_of_argument |= dict.fromkeys(_MASKS, "weight_decay_exclude")
    return {
        argument: key
        for argument, key in key_of_argument.items()
        if argument in _parameters(factory)
    }


def _check_arguments(name: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuses arguments that a factory does not take, or that keys of the run give it."""
    by_keys = _given_by_keys(name, factory)
    if "learning_rate" not in by_keys:
        raise ValueError(
            f"`optimizer` is {name!r}, which has no argument `learning_rate`, so the schedule of "
            "the run would not reach it. Add the argument: it is `step -> rate`."
        )
    refused = {
        of: why for (factory_name, of), why in _REFUSED_ARGUMENTS.items() if factory_name == name
    }
    kept_back = {*by_keys, *_INTERNAL, *refused}
    own = [p for p in _parameters(factory) if p not in kept_back]
    for argument in arguments:
        if argument in refused:
            raise ValueError(
                f"`optimizer_arguments` has {argument!r}, which {name} cannot be given here: "
                f"{refused[argument]}. Leave it out."
            )
        if argument in by_keys:
            key = by_keys[argument]
            raise ValueError(
                f"`optimizer_arguments` has {argument!r}, which the key `{key}` gives to "
                f"{name}. Set `{key}`."
            )
        if argument not in own:
            raise ValueError(
                f"`optimizer_arguments` has {short_repr(argument)}, which {name} does not take. "
                f"It takes {', '.join(own) or 'none'}."
            )


def _named(name: str) -> Callable[..., Any]:
    """Returns the factory of optax, or the user's function, with this name."""
    if ":" in name:
        return import_function("optimizer", name, "`learning_rate` and returns an optimizer")
    return factory_of(name)
