"""Defines the model that users write: an embedding, one layer and a loss, as plain functions.

params = {"embed": ..., "layers": ..., "head": ...}, where "layers" is a list of L trees of equal
structure, or one tree with leaves [L, ...]; and "shared" if all layers share parameters. `batch` is
any pytree of arrays [B, ...].
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._compat import of_user
from ..autodiff.staged_model import Past
from ..engines.fsdp import cast_group
from ._kinds import ByKind, InOrder, check_order


def _identity(tree: Any) -> Any:
    return tree


@dataclass(frozen=True)
class ModelFunction:
    """A function of a model, whose signature was read once.

    It is called with one argument more than `Model` says: a dropout key, needed or not. If it takes
    `past` and is given the state of earlier slices behind the key, it returns the pair of what it
    returns otherwise and the new state. One that stands for `loss` and computes what `apply`
    returns has `is_output`.
    """

    call: Callable[..., Any]
    takes_key: bool = False
    takes_past: bool = False
    is_output: bool = False

    def __call__(self, *arguments: Any) -> Any:
        with of_user():
            return self.call(*arguments)

    @property
    def __name__(self) -> str:
        """Returns the name of the function, which JAX shows."""
        return getattr(self.call, "__name__", type(self.call).__name__)


@dataclass(frozen=True)
class Model:
    """A model as plain functions. Each runs on one microbatch of b rows.

    That is so on every mesh. Where axes divide rows, functions run on the rows of a device if all
    are proven to treat rows one by one, and those that are not run on whole microbatches.

    A function that takes one argument more than is said here is given a dropout key as its last
    argument. Keys differ by layer, call (`accumulate`) and microbatch, and are the same in every
    engine and on every mesh: random numbers are drawn for whole microbatches.

    Attributes:
        embed: `(params["embed"], batch) -> x`: what enters the first layer, any pytree.
        layer: `(params of one layer, x, batch) -> x`, with the structure, shapes and dtypes of x;
            or `-> (x, aux)` with a dict of scalars, which are summed over layers and averaged over
            microbatches. `aux["loss"]` is added to the loss; all others become metrics. For several
            kinds of layers a dict of functions in the order in which kinds run, such as
            `{"encoder": encoder_layer, "decoder": decoder_layer}`; `params["layers"]` then has the
            same names, with the layers of each kind. A kind may return another x than it is given,
            if all of its layers are given the same; all leaves are then [b, ...]. A layer whose
            fourth parameter is called `past` can run slices of sequences, and returns `past` last:
            `(params of one layer, x, batch, past) -> (x, past)` or `-> (x, aux, past)`.
            `past.append((keys, values))` returns those of all slices so far, and the `past` to
            return.
        loss: `(params["head"], x, batch) -> loss`. The loss is a scalar, the mean over rows that
            count equally; or `jp.Weighted(total, weight)`, and the loss of the batch is the sum of
            totals divided by the sum of weights. `(loss, metrics)` with a dict is accepted for
            both. Metrics are scalars, which are averaged over microbatches, or arrays [b, ...],
            which are returned for all rows of the batch, [B, ...].
        tied: Whether `loss` also reads the parameters of the embedding. Its first argument is then
            `{"head": params["head"], "embed": params["embed"]}`.
        to_groups: From the user's tree of parameters to `{"embed", "layers", "head"}`. The default
            takes a tree of that form.
        from_groups: The inverse of `to_groups`.
        shared: Whether all layers also read `params["shared"]`, parameters that they share. The
            first argument of `layer` is then `{"layer": params of one layer, "shared":
            params["shared"]}`.
        vocab_parallel_loss: `(params["head"], x, batch, axis) -> loss`: the same loss, computed by
            all ranks of the mesh axis `axis` together, each for its part of the vocabulary, for
            `pipeline(vocab_parallel=True)`. Every rank is given the same arguments and returns the
            same numbers: what is summed over the vocabulary is summed by `jax.lax.psum(..., axis)`,
            as `vocab_parallel_cross_entropy` does.
        sliced_leaves: For schedules with slices of sequences: booleans in a tree that is a prefix
            of `batch`, true for leaves [B, T, ...] that are cut along T. Default: all leaves with
            at least two dims.
        contributions: Whether functions return what they contribute to the batch, in place of
            means: the loss, `aux` and metrics are summed over layers, microbatches and the devices
            that divide rows. It is for losses whose weights are known before the step, such as
            those of tokens divided by the sum over the batch. `batch` then has leaves [A * M, b,
            ...], and `loss` returns (loss, metrics). In a pipeline a function is called with the
            rows of one device; the engine "unpipelined" calls it with all rows. Functions cast the
            parameters that they read; `compute_dtype` casts them before they are gathered. `layer`
            is given the key of a microbatch, the same on every device, by which
            `sharding.local_draws` draws; or () if `value` is given none. `vocab_parallel_loss` is
            that of `autodiff.StagedModel`.
        layer_constants: [L, ...] arrays, any pytree, that are no parameters and differ between
            layers of one stack, such as the index of an attention that each chooses by
            `jax.lax.switch`. `layer` is given `(key, constants of this layer)` in place of its key.
            For `contributions` alone. Default: there are none, and it is given its key.
        order: The kind of every layer in the order in which they run, such as `("local", "local",
            "global") * 8`, if kinds do not run one after the other. `params["layers"]` is then a
            list of all layers in this order.
        layer_costs: The cost of a layer of each kind, such as `layer_flops` returns. Layers are
            divided over stages so that the largest stage costs least, if that is at least a
            twentieth less than with equal numbers of layers. Default: all layers cost the same.
        output: `(first argument of loss, x, batch) -> arrays [b, ...]`, any pytree, such as logits:
            what `PipelinedModel.apply` returns for every row. Default: x, what leaves the last
            layer.
        sequence_dim: The dim of tokens, 1 for [b, T, ...]: leaves of x and of the batch with such a
            dim are divided over the axis `context` of the mesh. Functions are given whole sequences
            all the same, so positions are `jnp.arange(T)`. What is elementwise along the dim runs
            on each device's share, attention by `jaxpipe.attention`; for all other functions of
            several tokens, such as convolutions, XLA moves what they read. With `contributions`
            `embed` and `loss` may be given the tokens of one device. Default: sequences are whole.
        plain: `(params, batch) -> loss` or `-> (loss, metrics)`: the program that these functions
            are parts of, in the user's tree, with which `PipelinedModel.check` compares. Default:
            the functions one after the other.

    Example:
        >>> model = Model(
        ...     embed=lambda w, batch: batch["x"] * w,
        ...     layer=lambda w, x, batch: x + w,
        ...     loss=lambda w, x, batch: (x * w).mean(),
        ... )
        >>> model.tied
        False
    """

    embed: Callable[..., Any]
    layer: Callable[..., Any] | Mapping[str, Callable[..., Any]]
    loss: Callable[..., Any]
    tied: bool = False
    to_groups: Callable[[PyTree], dict[str, PyTree]] = _identity
    from_groups: Callable[[dict[str, PyTree]], PyTree] = _identity
    shared: bool = False
    sliced_leaves: PyTree = None
    vocab_parallel_loss: Callable[..., Any] | None = None
    contributions: bool = False
    layer_constants: PyTree = None
    order: Sequence[str] | None = None
    layer_costs: Mapping[str, float] | None = None
    output: Callable[..., Any] | None = None
    sequence_dim: int | None = None
    plain: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        layer = self.layer
        keyed: dict[str, Any] = {
            "embed": model_function(self.embed, "embed", 2),
            "loss": model_function(self.loss, "loss", 3),
        }
        if self.output is not None:
            keyed["output"] = model_function(self.output, "output", 3)
        if isinstance(layer, Mapping):
            keyed["layer"] = {
                kind: layer_function(f, f"layer[{kind!r}]") for kind, f in layer.items()
            }
        else:
            keyed["layer"] = layer_function(layer, "layer")
        for name, function in keyed.items():
            object.__setattr__(self, name, function)
        if not self.layer:
            raise ValueError("`layer` is empty. Give a function for each kind of layers.")
        _check_costs(self.layer_costs, layer)
        if self.sequence_dim is not None and self.sequence_dim < 1:
            raise ValueError(
                f"`sequence_dim` is {self.sequence_dim}. Give the dim of tokens, such as 1: "
                "dim 0 has the rows."
            )
        if self.order is None:
            return
        check_order(self.order, layer)
        order, to_groups, from_groups = tuple(self.order), self.to_groups, self.from_groups
        if isinstance(to_groups, ByKind):  # of a model that this one replaces
            to_groups, from_groups = to_groups.to_groups, cast(InOrder, from_groups).from_groups
        object.__setattr__(self, "order", order)
        object.__setattr__(self, "to_groups", ByKind(order, to_groups))
        object.__setattr__(self, "from_groups", InOrder(order, from_groups))

    @property
    def has_kinds(self) -> bool:
        """True if layers are of several kinds."""
        return isinstance(self.layer, Mapping)

    @property
    def layer_functions(self) -> tuple[ModelFunction, ...]:
        """Returns the function of a layer of each kind."""
        layers: Any = self.layer
        return tuple(layers.values()) if self.has_kinds else (layers,)

    @property
    def functions(self) -> tuple[ModelFunction, ...]:
        """Returns embedding, layers and loss."""
        embed, loss = cast(Any, self.embed), cast(Any, self.loss)
        return embed, *self.layer_functions, loss

    @property
    def loss_name(self) -> str:
        """Returns the user's name of the function `loss`: "output" if it computes that instead."""
        return "output" if self.functions[-1].is_output else "loss"

    @property
    def takes_key(self) -> bool:
        """Returns whether a function of the model takes a dropout key."""
        return any(function.takes_key for function in self.functions)


def _check_costs(costs: Mapping[str, float] | None, layer: Any) -> None:
    if costs is None:
        return
    kinds = list(layer) if isinstance(layer, Mapping) else []
    if set(costs) != set(kinds):
        raise ValueError(
            f"`layer_costs` has {sorted(costs)}, and the kinds of `layer` are {sorted(kinds)}. "
            "Give a cost for each kind, or leave it out."
        )
    if not all(cost >= 0 for cost in costs.values()) or not any(costs.values()):
        raise ValueError(f"`layer_costs` is {dict(costs)}. Give costs of 0 or more, one above 0.")


def layer_function(function: Callable, name: str) -> ModelFunction:
    """Reads the signature of a layer, which has a fourth parameter `past` if it can run slices."""
    if isinstance(function, ModelFunction):
        return function
    names = list(_parameters(function) or ()) if callable(function) else []
    takes_past = "past" in names
    keyed = model_function(function, name, 4 if takes_past else 3)
    if not takes_past:
        return keyed
    if names[3:4] != ["past"]:
        raise ValueError(
            f"`{name}` takes ({', '.join(names)}). `past` must be the fourth parameter, behind the "
            "parameters of one layer, x and batch."
        )

    def call(params: PyTree, x: PyTree, batch: PyTree, key: Any, past: Past | None = None) -> Any:
        returned = keyed(params, x, batch, Past() if past is None else past, key)
        result, new_past = _without_past(returned, name)
        return result if past is None else (result, new_past)

    return ModelFunction(call, keyed.takes_key, takes_past=True)


def _without_past(returned: Any, name: str) -> tuple[Any, Past]:
    """Returns the result of a layer, and the state that it returns last."""
    past = returned[-1] if isinstance(returned, tuple) and len(returned) in (2, 3) else None
    if not isinstance(past, Past) or past.new is None:
        raise ValueError(
            f"`{name}` takes `past` and must return it last, as (x, past) or (x, aux, past), where "
            "`past` is the second result of `past.append((keys, values))`."
        )
    *result, _ = returned
    return (result[0] if len(result) == 1 else tuple(result)), past


def _parameters(function: Callable) -> Mapping[str, inspect.Parameter] | None:
    """Returns the parameters of a function by name; None without a signature, as for a builtin."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def model_function(function: Callable, name: str, count: int) -> ModelFunction:
    """Reads the signature of a function of `count` arguments and, if it has dropout, a key."""
    if isinstance(function, ModelFunction):
        return function
    if not callable(function):
        raise ValueError(f"`{name}` is {function!r}. Give a function of {count} arguments.")
    takes_key = _takes_one_more(function, name, count)

    @wraps(function)
    def call(*arguments: Any) -> Any:
        return function(*(arguments if takes_key else arguments[:count]))

    return ModelFunction(call, takes_key)


def _takes_one_more(function: Callable, name: str, count: int) -> bool:
    by_name = _parameters(function)
    if by_name is None:
        return False
    parameters = by_name.values()
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    required = [p for p in parameters if p.kind in kinds and p.default is p.empty]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return False
    allowed = sum(p.kind in kinds for p in parameters)
    if len(required) > count + 1 or allowed < count:
        names = ", ".join(p.name for p in parameters)
        raise ValueError(
            f"`{name}` takes ({names}). Give a function of {count} arguments, or of {count + 1}, "
            "of which the last one is a dropout key."
        )
    return len(required) == count + 1


def check_model(model: Any) -> None:
    """Checks that a model is one."""
    if not isinstance(model, Model):
        raise ValueError(
            f"`model` is {type(model).__name__}. Give a `jaxpipe.Model`: one of your own "
            "functions, or the first result of `jaxpipe.nnx.model`, `jaxpipe.linen.model` or "
            "`jaxpipe.equinox.model`."
        )


def check_contributions(model: Model, **unread: Any) -> None:
    """Checks that a model of contributions is given none of the options that it does not read."""
    if not model.contributions:
        if model.layer_constants is not None:
            raise ValueError(
                "`Model.layer_constants` is given, and `Model.contributions` is False. Give kinds "
                "of layers, `Model(layer={...}, order=[...])`, or functions that return "
                "contributions."
            )
        return
    unread |= {
        "Model.shared": model.shared or None,
        "Model.sliced_leaves": model.sliced_leaves,
    }
    names = [f"`{name}`" for name, value in unread.items() if value is not None]
    if names:
        raise ValueError(
            f"`Model.contributions` is True, and {' and '.join(names)} is given, which is for "
            "functions that return means. Leave it out, or write functions that return means."
        )
    for name, function in {"embed": model.functions[0], "loss": model.functions[-1]}.items():
        if function.takes_key:
            raise ValueError(
                f"`Model.contributions` is True, and `{name}` takes a key, which only layers are "
                "given. Draw in a layer, or write functions that return means."
            )


def with_constants(model: Model, keys: PyTree, num_layers: int) -> PyTree:
    """Returns [L, ...] keys of layers, in a pair with the constants of layers if there are any."""
    if model.layer_constants is None:
        return keys
    for leaf in jax.tree.leaves(model.layer_constants):
        if jnp.shape(leaf)[:1] != (num_layers,):
            raise ValueError(
                f"`Model.layer_constants` has an array of shape {jnp.shape(leaf)}, and there are "
                f"{num_layers} layers. Give [{num_layers}, ...] arrays."
            )
    return keys, model.layer_constants


def check_means(model: Model, method: str) -> None:
    """Checks that functions return means, which a method of a pipeline needs."""
    if model.contributions:
        raise ValueError(
            f"`{method}` is for functions that return means, and `Model.contributions` is True: it "
            "runs them on other parts of a batch, where they contribute something else. Compare "
            "with a sum over microbatches of your own, and take `compile` for memory."
        )


def check_sliced(model: Model, num_slices: int) -> None:
    """Checks that a model can run slices of sequences."""
    if num_slices == 1:
        return
    if not all(function.takes_past for function in model.layer_functions):
        raise ValueError(
            f"`schedule` cuts sequences into {num_slices} slices, and `layer` has no parameter "
            "`past`, by which a slice sees those before it. Give `layer(params, x, batch, past) -> "
            "(x, past)`, whose attention reads `past.append((keys, values))`; or a schedule of "
            "whole microbatches, such as 1f1b."
        )
    if model.takes_key:
        raise ValueError(
            f"`schedule` cuts sequences into {num_slices} slices, and a function of the model "
            "takes a dropout key. Masks that are drawn for slices are not those of whole "
            "sequences: give functions without dropout, or a schedule of whole microbatches."
        )


def with_call(function: Any, call: Callable) -> Any:
    """Returns a function of the model that calls `call`; `vocab_parallel_loss` is a plain one."""
    return replace(function, call=call) if isinstance(function, ModelFunction) else call


def cast_model(model: Model, dtype: Any) -> Model:
    """Returns a model whose functions are given parameters that are cast by `compute_dtype`."""
    if dtype is None or model.contributions:
        return model

    def casting(function: Any, group: str) -> Any:
        def call(params: PyTree, *arguments: Any) -> Any:
            return function(cast_group(dtype, group, params), *arguments)

        return with_call(function, call)

    def casting_layer(function: Any, group: str) -> Any:
        if not model.shared:
            return casting(function, group)

        def call(params: PyTree, *arguments: Any) -> Any:
            own = cast_group(dtype, group, params["layer"])
            shared = cast_group(dtype, "['shared']", params["shared"])
            return function({"layer": own, "shared": shared}, *arguments)

        return with_call(function, call)

    layers: Any = model.layer
    if isinstance(layers, Mapping):
        layers = {k: casting_layer(f, f"['layers'][{k!r}]") for k, f in layers.items()}
    else:
        layers = casting_layer(layers, "['layers']")
    of_loss = partial(casting, group="" if model.tied else "['head']")
    return replace(
        model,
        embed=casting(model.embed, "['embed']"),
        layer=layers,
        loss=of_loss(model.loss),
        vocab_parallel_loss=model.vocab_parallel_loss and of_loss(model.vocab_parallel_loss),
        output=model.output and of_loss(model.output),
    )
