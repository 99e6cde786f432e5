"""Finds out which functions of a model treat rows one by one, and which need a whole microbatch.

A microbatch has b rows, which D devices divide. A function that treats rows one by one runs on the
b / D rows of each device. All others, and all functions beside them, are given the b rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval
from jax.sharding import AxisType, Mesh
from jaxtyping import PyTree

from .._compat import ClosedJaxpr
from ..autodiff.staged_model import Past
from ..engines.fsdp import row_axes
from ..ir.rows import (
    MEAN,
    Draws,
    Mixed,
    Relation,
    Rows,
    Sum,
    Whole,
    Zero,
    can_draw_own,
    compare,
    described,
    draws_by_other_keys,
    is_within,
    join,
    row_dim,
)
from ..kernels import trace_to_read
from ._layer_results import x_and_aux
from ._losses import loss_parts
from ._model import Model
from ._pieces import num_rows

RowWise = bool | Mapping[str, bool] | None
"""What the user says of functions by name, or of all."""


@dataclass(frozen=True)
class FunctionRows:
    """The result of the row analysis of one function of a model.

    Attributes:
        name: "embed", "layer" or the name of a kind of layers, or "loss".
        is_row_wise: Whether it may run on the rows of a device.
        draws: The random numbers that a device draws if the function needs all rows for nothing
            else: the shapes, and their dims of rows. None if it needs them for more, or draws in a
            loop.
        reason: Why, such as "`sort` goes along rows (model.py:12)".
    """

    name: str
    is_row_wise: bool
    draws: tuple[tuple[tuple[int, ...], int], ...] | None
    reason: str

    @property
    def verdict(self) -> str:
        """Returns the result in words."""
        if self.is_row_wise:
            return "row-wise"
        return "may mix rows" if self.draws is None else "draws for all rows"


@dataclass(frozen=True)
class RowReport:
    """The rows that the functions of a model see, and why. It prints as a table.

    Attributes:
        functions: One entry for every function.
        num_rows: b, the rows of a microbatch.
        num_shards: D, the devices that divide them.
        is_divided: Whether XLA divides the work of functions that mix rows. False: each device runs
            these on all rows.
        x_dims: The dim of rows of every leaf of x; None for a leaf without.
        reason_of_x: Why x cannot be gathered for a function that mixes rows; None if it can.
    """

    functions: tuple[FunctionRows, ...]
    num_rows: int
    num_shards: int
    is_divided: bool = True
    x_dims: tuple[int | None, ...] = ()
    reason_of_x: str | None = None

    @property
    def whole_microbatches(self) -> bool:
        """Returns whether functions are given whole microbatches, and not the rows of a device."""
        return not all(function.is_row_wise for function in self.functions)

    @property
    def seen_rows(self) -> int:
        """Returns the number of rows that a function sees, on a device or divided by XLA."""
        is_whole = self.whole_microbatches and (self.is_divided or self.run_on_every_device)
        return self.num_rows if is_whole else self.num_rows // self.num_shards

    @property
    def run_on_every_device(self) -> tuple[str, ...]:
        """Returns the names of functions that each of the D devices runs on all rows."""
        if self.is_divided or self.num_shards == 1:
            return ()
        return tuple(f.name for f in self.functions if not f.is_row_wise and f.draws is None)

    @property
    def draws(self) -> dict[str, Draws]:
        """Random bits that functions draw for the rows of a device, out of those of all rows."""
        if self.is_divided or self.num_shards == 1:
            return {}
        return {f.name: dict(f.draws) for f in self.functions if f.draws is not None}

    def __str__(self) -> str:
        end = f"Functions see {self.seen_rows} of {self.num_rows} rows, those of a device."
        if self.num_shards == 1:
            end = f"No axis divides rows: functions see microbatches of {self.num_rows} rows."
        elif self.draws and not self.run_on_every_device:
            end += " They draw its part of the random numbers of all rows."
        elif self.run_on_every_device:
            end = (
                f"Each of {self.num_shards} devices runs {', '.join(self.run_on_every_device)} on "
                f"all {self.num_rows} rows of a microbatch, and other functions on its own rows."
            )
        elif self.whole_microbatches:
            end = (
                f"Functions see microbatches of {self.num_rows} rows, which XLA divides over "
                f"{self.num_shards} devices."
            )
        width = max(len(function.name) for function in self.functions)
        lines = (f"{f.name:{width}}  {f.verdict}: {f.reason}" for f in self.functions)
        return "\n".join((*lines, end))

    __repr__ = __str__

    @property
    def summary(self) -> str:
        """Returns the report in one line."""
        others = [f"{f.name} {f.verdict}" for f in self.functions if not f.is_row_wise]
        if not others:
            return f"row-wise: {', '.join(f.name for f in self.functions)}"
        return f"whole microbatches, as {', '.join(others)}"

    def check(self, mesh: Mesh, reduce_dtype: Any = None) -> None:
        """Checks that functions can be given whole microbatches, if they are to be.

        Raises:
            ValueError: If axes that divide rows are explicit, x is not known well enough, or
                gradients that XLA sums are to be rounded to `reduce_dtype`.
        """
        if not self.whole_microbatches:
            return
        on_each = self.run_on_every_device or self.draws
        if reduce_dtype is not None and not on_each:
            raise ValueError(
                f"`reduce_dtype` is {reduce_dtype}, and {self.summary}, whose gradients XLA sums "
                "as it divides them. Leave it out, or say by `row_wise` that these functions treat "
                "rows one by one."
            )
        why = "; ".join(f"{f.name}: {f.reason}" for f in self.functions if not f.is_row_wise)
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        explicit = [axis for axis in row_axes(mesh) if types[axis] == AxisType.Explicit]
        if explicit and not on_each:
            raise ValueError(
                f"Functions of the model need whole microbatches ({why}), and the axes "
                f"{', '.join(explicit)} of `mesh`, which divide rows, are explicit. Make the mesh "
                "by `jaxpipe.make_mesh`, whose axes are automatic, or say by `row_wise` that the "
                "functions treat rows one by one."
            )
        if self.run_on_every_device and self.reason_of_x:
            raise ValueError(
                f"Functions of the model need whole microbatches ({why}), and {self.reason_of_x}. "
                "Return a mean over rows, or use the engine 'circular' or 'mpmd'."
            )


def function_names(model: Model) -> tuple[str, ...]:
    """Returns the names of the functions of a model, in the order in which they run."""
    kinds = tuple(model.layer) if isinstance(model.layer, Mapping) else ("layer",)
    return ("embed", *kinds, model.loss_name)


def check_row_wise(row_wise: RowWise, model: Model) -> dict[str, bool]:
    """Checks `row_wise`, and returns it by name, for functions of which something is said."""
    names = (*function_names(model), "output")
    if row_wise is None:
        return {}
    if isinstance(row_wise, bool):
        return dict.fromkeys(names, row_wise)
    if not isinstance(row_wise, Mapping) or not all(isinstance(v, bool) for v in row_wise.values()):
        raise ValueError(
            f"`row_wise` is {row_wise!r}. Give True or False for all functions, or a dict such as "
            f"{{{names[1]!r}: True}}."
        )
    unknown = [name for name in row_wise if name not in names]
    if unknown:
        raise ValueError(
            f"`row_wise` names {', '.join(map(repr, unknown))}. The functions of the model are "
            f"{', '.join(map(repr, names))}."
        )
    return dict(row_wise)


@dataclass(frozen=True)
class Activations:
    """The x that enters a function, with the state of a slice.

    Attributes:
        shapes: x for all rows of a microbatch, and for those of a device.
        relations: The relation of every leaf to the rows.
    """

    shapes: tuple[PyTree, PyTree]
    relations: tuple[Relation, ...]


NO_ACTIVATIONS = Activations(((), ()), ())
"""The inputs of the embedding."""


class BatchBlocks(NamedTuple):
    """A microbatch that is cut into equal blocks, of rows or of tokens.

    Attributes:
        batches: The shapes of the whole microbatch, and those of a block.
        key: The shape of the dropout key, or ().
    """

    batches: tuple[PyTree, PyTree]
    key: Any
    num_blocks: int


def layers_with_weights(
    model: Model, weights: dict[str, PyTree]
) -> Iterator[tuple[str, Callable, PyTree]]:
    """Yields the name and the function of each kind of layers, and its first argument."""
    for name, function in zip(function_names(model)[1:-1], model.layer_functions, strict=True):
        params = weights["layers"][name] if model.has_kinds else weights["layers"]
        shared = {"layer": params, "shared": weights["shared"]} if model.shared else None
        yield name, function, shared or params


def weights_of_loss(model: Model, weights: dict[str, PyTree]) -> PyTree:
    """Returns the first argument of the loss."""
    return {name: weights[name] for name in ("head", "embed")} if model.tied else weights["head"]


def row_report(
    model: Model,
    weights: dict[str, PyTree],
    batches: tuple[PyTree, PyTree],
    key: Any,
    given: Mapping[str, bool],
    *,
    num_shards: int,
    is_divided: bool = True,
    num_slices: int = 1,
) -> RowReport:
    """Traces the functions of a model and says which of them treat rows one by one.

    Args:
        weights: Shapes of the groups "embed", "layers", "head" and, if there is one, "shared".
            Those of layers are of one layer; or a dict with one of each kind.

    Returns:
        A report with one entry for each function of the model.
    """
    names, (whole_rows, num_block) = function_names(model), map(num_rows, batches)
    num_blocks, verdicts = whole_rows // num_block, dict[str, FunctionRows]()
    states: list[Activations] = []
    if num_blocks == 1:
        one = (FunctionRows(name, True, None, "there is one row") for name in names)
        return RowReport(tuple(one), whole_rows, num_shards)
    blocks = BatchBlocks(batches, key, num_blocks)

    def judged(name: str, judge: Callable[..., Any], weights: PyTree, x: Activations) -> Any:
        """Returns the activations behind a function, and notes what is known of it."""
        reason, draws, after = judge(weights, blocks, x)
        verdicts[name] = _verdict(name, reason, draws, given)
        states.append(after)
        return after

    try:
        x = judged("embed", partial(judge_embed, model), weights["embed"], NO_ACTIVATIONS)
        for name, function, params in layers_with_weights(model, weights):
            past = _past_of_rows(function, num_slices, params, blocks, x)
            x = judged(name, partial(judge_layer, function, past), params, x)
        judged(names[-1], partial(judge_loss, model), weights_of_loss(model, weights), x)
    except UntracedError as error:
        reason = str(error)
        for name in names:
            if name not in verdicts:
                verdicts[name] = _verdict(name, reason, {}, given)
                reason = "a function before it could not be traced"
    known = [_without_zeros(state, num_blocks) for state in states if state is not None]
    x_dims, reason_of_x = _dims_of_x(known)
    functions = tuple(verdicts.values())
    return RowReport(
        functions=functions,
        num_rows=whole_rows,
        num_shards=num_shards,
        is_divided=is_divided,
        x_dims=x_dims,
        reason_of_x=reason_of_x,
    )


def _without_zeros(x: Activations, num_blocks: int) -> Activations:
    """Returns x with zeros as what their shapes say."""
    by_shapes = _by_shapes(x.shapes, num_blocks).relations
    pairs = zip(x.relations, by_shapes, strict=True)
    return Activations(x.shapes, tuple(b if isinstance(a, Zero) else a for a, b in pairs))


def _dims_of_x(states: Sequence[Activations]) -> tuple[tuple[int | None, ...], str | None]:
    """Returns the dims of rows of leaves of x, and why x cannot be gathered, if it cannot."""
    if not states:  # the embedding could not be traced, and the next trace of it says why
        return (), None
    row_dims: list[int | None] = []
    for relations in zip(*(state.relations for state in states), strict=True):
        dims = {r.dim if isinstance(r, Rows) else None for r in relations}
        if len(dims) > 1:
            return (), "x has rows in different dims before and behind a layer"
        strange = next((r for r in relations if not _is_rows_or_mean(r)), None)
        if strange is not None:
            return (), f"x has a leaf that is neither rows nor a mean: {described(strange)}"
        row_dims.append(dims.pop())
    return tuple(row_dims), None


def _is_rows_or_mean(relation: Relation) -> bool:
    if isinstance(relation, Rows):
        return replace(relation, is_uniform=False) == Rows(relation.dim)
    return is_within(relation, MEAN)


def _verdict(
    name: str, reason: str | None, draws: dict[str, Any], given: Mapping[str, bool]
) -> FunctionRows:
    if name in given:
        return FunctionRows(name, given[name], None, "as `row_wise` says")
    if reason is not None:
        return FunctionRows(name, False, None, reason)
    if not draws:
        return FunctionRows(name, True, None, "by its program")
    if draws["own"] is None:
        return FunctionRows(name, False, None, "it draws random numbers in a loop or a branch")
    return FunctionRows(name, False, draws["own"], "one key draws the same on every mesh")


def smallest_factor(count: int) -> int:
    """Returns the smallest factor of a number that is no 1, or 1 of 1."""
    return next((n for n in range(2, count + 1) if count % n == 0), 1)


class UntracedError(Exception):
    """A function of the user raised; an engine traces it again, and raises what it raised."""


def traced(trace: Callable, *arguments: Any, tokens: bool = False) -> Any:
    """Returns `trace(*arguments)`, which runs a function of the user."""
    try:
        with trace_to_read(tokens=tokens):
            return trace(*arguments)
    except Exception as error:
        text = f"tracing it alone raised {type(error).__name__}: {str(error)[:200]}"
        raise UntracedError(text) from error


def judge_embed(
    model: Model, weights: PyTree, blocks: BatchBlocks, x: Activations
) -> tuple[str | None, dict[str, Any], Activations]:
    """Returns the reason for which an embedding may mix rows, its draws, and its result."""

    def embed(weights: PyTree, x: PyTree, batch: PyTree, key: Any) -> PyTree:
        return model.embed(weights, batch, key)

    relations, results, draws = compared(embed, weights, blocks, x)
    after = _by_shapes(results, blocks.num_blocks)
    reason = _reason_of_mixed(relations)
    return reason, draws, after if reason else Activations(results, tuple(relations))


def _past_of_rows(
    function: Callable, num_slices: int, weights: PyTree, blocks: BatchBlocks, x: Activations
) -> Activations:
    """Returns the `Past` of a layer that runs slices, and the relations of its leaves to rows."""
    if num_slices == 1:
        return NO_ACTIVATIONS
    offset = jax.ShapeDtypeStruct((), jnp.int32)

    def state_of(weights: PyTree, x: PyTree, batch: PyTree, key: Any) -> PyTree:
        past = Past(offset=0, num_slices=num_slices)
        return function(weights, x, batch, key, past)[1].earlier

    shape_of_state = partial(jax.eval_shape, state_of, weights)
    pasts = [
        Past(traced(shape_of_state, of_x, batch, blocks.key), offset=offset, num_slices=num_slices)
        for of_x, batch in zip(x.shapes, blocks.batches, strict=True)
    ]
    rows = tuple(Rows(0) for _ in jax.tree.leaves(pasts[0].earlier))
    return Activations((pasts[0], pasts[1]), (*rows, Whole()))


def judge_layer(
    function: Callable,
    past: Activations,
    weights: PyTree,
    blocks: BatchBlocks,
    x: Activations,
    *,
    row_dim: int = 0,
) -> tuple[str | None, dict[str, Any], Activations]:
    """Returns the reason for which a layer may mix rows, its draws, and its result."""

    def run(weights: PyTree, x_and_past: Any, batch: PyTree, key: Any) -> Any:
        x, past = x_and_past
        if not past:
            return *x_and_aux(function(weights, x, batch, key), x), ()
        returned, new_past = function(weights, x, batch, key, past)
        return *x_and_aux(returned, x), new_past.new

    (whole_x, part_x), (whole_past, part_past) = x.shapes, past.shapes
    shapes = (whole_x, whole_past), (part_x, part_past)
    after, count = x, len(x.relations)
    while True:  # until what leaves a layer is what enters it, as there are layers behind
        entering = Activations(shapes, (*after.relations, *past.relations))
        relations, results, draws = compared(run, weights, blocks, entering)
        joined = tuple(join(a, b) for a, b in zip(after.relations, relations[:count], strict=True))
        reason = _reason_of_mixed(joined)
        if reason or joined == after.relations:
            break
        after = Activations(x.shapes, joined)
    if reason:
        return reason, draws, _by_shapes(x.shapes, blocks.num_blocks)
    aux = results[0][1]
    names = [f"aux[{name!r}]" for name in sorted(aux)]
    reason = _reason_of_means(names, relations[count : count + len(names)])
    for relation in relations[count + len(names) :]:
        if not is_within(relation, Rows(row_dim)):
            reason = reason or f"`past` is given what has no rows in dim {row_dim}: {relation}"
    return reason, draws, after


def judge_loss(
    model: Model, weights: PyTree, blocks: BatchBlocks, x: Activations, *, row_dim: int = 0
) -> tuple[str | None, dict[str, Any], None]:
    """Returns the reason for which a loss or metric may be no mean over rows, and its draws."""

    def loss(weights: PyTree, x: PyTree, batch: PyTree, key: Any) -> Any:
        parts = loss_parts(model.loss(weights, x, batch, key))
        return [parts.total], [] if parts.weight is None else [parts.weight], parts.metrics

    relations, results, draws = compared(loss, weights, blocks, x)
    _, weight, metrics = results[0]
    end = 1 + len(weight)
    named = list(zip(sorted(metrics), relations[end:], strict=True))
    scalars = [(name, relation) for name, relation in named if not metrics[name].shape]
    reason = _reason_of_mixed(relations[:end])
    if weight and draws:  # the sum of weights is needed before the loss has drawn
        reason = reason or "the loss draws random numbers, and its weight may depend on them"
    if reason is None and not weight:
        reason = _reason_of_means(["the loss"], relations[:1])
    elif reason is None and not _add_up_alike(relations[0], relations[1]):
        reason = "the total and the weight do not both add up over rows"
    for name, relation in named:
        if metrics[name].shape and not is_within(relation, Rows(row_dim)):
            why = str(relation) if isinstance(relation, Mixed) else described(relation)
            array = f"output{name}" if model.loss_name == "output" else f"metrics[{name!r}]"
            reason = reason or f"{array} has other than rows in dim {row_dim}: {why}"
    names = [f"metrics[{name!r}]" for name, _ in scalars]
    return reason or _reason_of_means(names, [r for _, r in scalars]), draws, None


def _add_up_alike(total: Relation, weight: Relation) -> bool:
    """Returns whether the quotient of sums over devices is that of all rows."""
    return any(
        is_within(total, Sum(scale)) and is_within(weight, Sum(scale)) for scale in range(-4, 5)
    )


def compared(
    function: Callable,
    weights: PyTree,
    blocks: BatchBlocks,
    x: Activations,
    *,
    tokens: bool = False,
) -> tuple[list[Relation], tuple[PyTree, PyTree], dict[str, Any]]:
    """Returns relations of results, their shapes in both programs, and what a device draws."""
    batches, key, num_blocks = blocks
    trace = partial(traced, jax.make_jaxpr(function, return_shape=True), tokens=tokens)
    programs = [
        trace(weights, shapes, batch, key) for shapes, batch in zip(x.shapes, batches, strict=True)
    ]
    (whole, results), (part, results_of_part) = programs
    counts = [len(jax.tree.leaves(tree)) for tree in (weights, batches[0], key)]
    relations = [
        *[Whole()] * counts[0],
        *x.relations,
        *_by_shapes(batches, num_blocks).relations,
        *[Whole()] * counts[2],
    ]
    noted: dict[tuple[int, ...], set[int | None]] = {}
    is_key = [False] * (len(relations) - counts[2]) + [True] * counts[2]
    # By another key than that of dropout, all devices would draw the same for their rows.
    ignores = tokens or draws_by_other_keys(whole.jaxpr, is_key)
    draws = None if ignores else noted
    of_results = compare(whole, part, relations, num_blocks, draws=draws, ids_are_rows=tokens)
    return of_results, (results, results_of_part), _draws(whole, part, counts[2], noted)


def _draws(
    whole: ClosedJaxpr,
    part: ClosedJaxpr,
    num_keys: int,
    noted: dict[tuple[int, ...], set[int | None]],
) -> dict[str, Any]:
    """Returns the draws of a function: {} for none, or "own": `FunctionRows.draws`."""
    if not num_keys:
        return {}
    _, used = partial_eval.dce_jaxpr(whole.jaxpr, [True] * len(whole.jaxpr.outvars))
    if not any(used[-num_keys:]):
        return {}
    own = {shape: dim for shape, dims in noted.items() for dim in dims if dim is not None}
    is_clear = all(len(noted[shape]) == 1 for shape in own)
    is_replaceable = is_clear and can_draw_own(part, own)
    return {"own": tuple(own.items()) if is_replaceable else None}


def _by_shapes(shapes: tuple[PyTree, PyTree], num_blocks: int) -> Activations:
    """Returns activations of which only shapes are known: the dim that differs is that of rows."""
    pairs = zip(*map(jax.tree.leaves, shapes), strict=True)
    dims = [row_dim(whole.shape, part.shape, num_blocks) for whole, part in pairs]
    return Activations(shapes, tuple(Whole() if dim is None else Rows(dim) for dim in dims))


def _reason_of_mixed(relations: Sequence[Relation]) -> str | None:
    return next((str(relation) for relation in relations if isinstance(relation, Mixed)), None)


def _reason_of_means(names: Sequence[str], relations: Sequence[Relation]) -> str | None:
    """Returns which value is no mean over rows, and why; None if all are."""
    for name, relation in zip(names, relations, strict=True):
        if not is_within(relation, MEAN):
            why = str(relation) if isinstance(relation, Mixed) else described(relation)
            return f"{name} is no mean over rows: {why}"
    return None
