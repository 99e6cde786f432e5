"""Which functions of a model move values between tokens, beside attention.

XLA divides what they compute over `context`, and may do so by a collective permute. In a branch
that some ranks do not take, devices would wait for each other for ever. And a schedule with slices
gives a function a part of the tokens, and adds up what it returns.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from ..._compat import ClosedJaxpr
from ...autodiff.staged_model import Past
from ...ir.rows import FirstRow, Mixed, Rows, Whole, source_line
from .._layer_results import x_and_aux
from .._losses import loss_parts
from .._model import Model
from .._pieces import shape_of
from .._rows import (
    NO_ACTIVATIONS,
    Activations,
    BatchBlocks,
    UntracedError,
    compared,
    judge_embed,
    judge_layer,
    judge_loss,
    layers_with_weights,
    traced,
    weights_of_loss,
)
from .._sequences import CONTEXT, is_divided
from ._masks import Entries, Origins, equation_with_other_number, unmasked_read

_WAITS = (
    "This engine runs it in a branch that other ranks do not take, where devices could wait for "
    "each other."
)


def check_token_wise(
    model: Model, weights: dict[str, PyTree], rows: PyTree, key: Any, mesh: Mesh
) -> bool:
    """Checks that functions treat tokens one by one, apart from `jaxpipe.attention`.

    It returns whether a slice of x is what the embedding makes of a slice of its inputs. More is
    allowed: positions and random bits of a slice are not those of the first tokens.
    """
    size, dim = mesh.shape.get(CONTEXT, 1), model.sequence_dim
    if dim is None or size == 1:
        return False
    batches = rows, jax.tree.map(partial(_share, dim, size), rows)
    blocks = BatchBlocks(batches, jax.tree.map(shape_of, key), size)

    def judged(name: str, run: Callable, weights: PyTree, x: Activations) -> Activations:
        try:
            relations, results, _ = compared(run, weights, blocks, x, tokens=True)
        except UntracedError as error:
            raise ValueError(
                f"{name} is not known to treat tokens one by one, and this engine runs it in a "
                f"branch that other ranks do not take: {error}"
            ) from error.__cause__
        mixed = next((r for r in relations if isinstance(r, Mixed)), None)
        if mixed is not None:
            raise ValueError(
                f"{name} moves values between tokens ({_of_tokens(str(mixed))}), which the {size} "
                f"devices of the axis {CONTEXT!r} divide. {_WAITS} Write attention by "
                "`jaxpipe.attention`, and shift targets in the batch; for all else take "
                "`schedule='circular'` or `engine='mpmd'`."
            )
        leaves = jax.tree.leaves(results[0][0])
        after = tuple(relations[: len(leaves)])
        if name != model.loss_name:
            for leaf, relation in zip(leaves, after, strict=True):
                if is_divided(leaf.shape, dim, size) and not isinstance(relation, Rows):
                    raise ValueError(_not_made_of_tokens(name, leaf.shape, dim, size, rows))
        return Activations((results[0][0], results[1][0]), after)

    def embed(weights: PyTree, x: PyTree, batch: PyTree, key: Any) -> tuple[PyTree]:
        return (model.embed(weights, batch, key),)

    def layer_of(function: Callable) -> Callable:
        return lambda weights, x, batch, key: x_and_aux(function(weights, x, batch, key), x)

    def loss(weights: PyTree, x: PyTree, batch: PyTree, key: Any) -> tuple[PyTree]:
        return (loss_parts(model.loss(weights, x, batch, key)),)

    x = judged("embed", embed, weights["embed"], NO_ACTIVATIONS)
    for name, function, params in layers_with_weights(model, weights):
        x = judged(name, layer_of(function), params, x)
    judged(model.loss_name, loss, weights_of_loss(model, weights), x)
    relations, _, draws = compared(embed, weights["embed"], blocks, NO_ACTIVATIONS)
    return not draws and all(relation == Rows(dim) for relation in relations)


def check_slices(
    model: Model,
    weights: dict[str, PyTree],
    shapes_of: Callable[[int], PyTree],
    num_slices: int,
    *,
    past_grows: bool,
) -> None:
    """Checks that functions give for slices what they give for whole sequences.

    Args:
        shapes_of: Returns the shapes of a microbatch whose sequences are cut into so many slices.
        past_grows: Whether `past.append` returns what slices so far wrote, and not an array of the
            whole length.

    Raises:
        ValueError: If a function mixes tokens other than by what `past.append` returns, counts them
            from the first of a slice, or returns what is no mean over tokens.
    """
    blocks = BatchBlocks((shapes_of(1), shapes_of(num_slices)), (), num_slices)

    def judged(name: str, judge: Callable, weights: PyTree, x: Activations) -> Activations:
        try:
            reason, _, after = judge(weights, blocks, x)
        except UntracedError as error:
            raise ValueError(
                f"{name} is not known to treat tokens one by one, and `schedule` cuts sequences "
                f"into {num_slices} slices: {error}"
            ) from error.__cause__
        if reason is not None:
            raise ValueError(
                f"`schedule` cuts sequences into {num_slices} slices, and what {name} returns for "
                f"them is not that for whole sequences: {_of_tokens(reason)}. Let attention read "
                "what `past.append` returns, give positions (or `past.offset`), and targets that "
                "are shifted, as leaves of the batch, and return means over tokens or "
                "`Weighted(total, weight)`; or take a schedule without slices."
            )
        return after

    x = judged("embed", partial(judge_embed, model), weights["embed"], NO_ACTIVATIONS)
    for name, function, params in layers_with_weights(model, weights):
        judge = partial(_judge_sliced_layer, function, past_grows=past_grows)
        x = judged(name, judge, params, x)
    judge = partial(judge_loss, model, row_dim=1)
    judged(model.loss_name, judge, weights_of_loss(model, weights), x)


def _judge_sliced_layer(
    function: Callable, weights: PyTree, blocks: BatchBlocks, x: Activations, *, past_grows: bool
) -> tuple[str | None, Any, Activations]:
    """Returns the reason for which a layer mixes tokens beside its past, and its result."""
    batches, key, num_slices = blocks

    def appended(weights: PyTree, x: PyTree, batch: PyTree, key: Any) -> PyTree:
        return function(weights, x, batch, key, Past())[1].new

    earlier = traced(partial(jax.eval_shape, appended, weights), x.shapes[0], batches[0], key)
    length, offset = jax.tree.leaves(earlier)[0].shape[1], jax.ShapeDtypeStruct((), jnp.int32)
    whole, part = (
        _ReadPast(earlier, None, offset, num, jax.ShapeDtypeStruct((length // num,), jnp.int32))
        for num in (1, num_slices)
    )
    relations = *(Whole() for _ in jax.tree.leaves(earlier)), FirstRow(), Rows(0)
    past = Activations((whole, part), relations)
    reason, draws, after = judge_layer(function, past, weights, blocks, x, row_dim=1)

    def program_of(past: Past) -> ClosedJaxpr:
        arguments = weights, x.shapes[1], batches[1], key, past
        return jax.make_jaxpr(lambda *a: function(*a)[0])(*arguments)

    program, size = program_of(part), length // num_slices
    of_others = (
        *jax.tree.map(lambda _: Entries(), (weights, x.shapes[1])),
        jax.tree.map(lambda _: Entries(Origins.POSITIONS), batches[1]),
        jax.tree.map(lambda _: Entries(), key),
    )
    of_past = jax.tree.map(lambda _: Entries(Origins.LATER), part)

    def unmasked(first: int) -> JaxprEqn | None:
        offset, ids = np.array(first, np.int32), np.arange(first, first + size, dtype=np.int32)
        here = {"offset": offset, "ids": ids}
        here = {name: Entries(Origins.POSITIONS, value) for name, value in here.items()}
        entries = jax.tree.leaves((*of_others, replace(of_past, **here)))
        return unmasked_read(program, entries, first + size, length)

    if reason is None:
        equation = next(filter(None, map(unmasked, range(0, length - size, size))), None)
        if equation is not None:
            reason = (
                f"`{equation.primitive.name}` reads what later tokens append, with no mask before "
                f"it that hides them ({source_line(equation)})"
            )
    if past_grows and reason is None:
        grown = jax.tree.map(partial(_share, 1, num_slices), earlier)
        equation = equation_with_other_number(
            program.jaxpr, program_of(replace(part, earlier=grown, num_slices=1)).jaxpr
        )
        if equation is not None:
            reason = (
                f"`{equation.primitive.name}` is given a number that depends on the length of what "
                f"`append` returns ({source_line(equation)}), with this engine that of the slices "
                "so far"
            )
    return reason, draws, after


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("earlier", "new", "offset", "ids"),
    meta_fields=("num_slices",),
)
@dataclass(frozen=True)
class _ReadPast(Past):
    """A `Past` for programs that are read: what all slices wrote is an argument."""

    ids: Any = None  # [t], the positions of the tokens of the slice

    def append(self, new: PyTree) -> "tuple[PyTree, Past]":
        """Returns the state of all slices."""
        return self.earlier, replace(self, earlier=None, new=new)

    def positions(self, num_tokens: int) -> Array:
        """Returns the positions of the tokens of the slice."""
        return self.ids[:num_tokens]


def _of_tokens(reason: str) -> str:
    return reason.replace("rows", "tokens").replace("row ", "token ")


def _not_made_of_tokens(
    name: str, shape: tuple[int, ...], dim: int, size: int, rows: PyTree
) -> str:
    whole = [x.shape for x in jax.tree.leaves(rows) if not is_divided(x.shape, dim, size)]
    return (
        f"{name} returns {list(shape)}, whose dim {dim} the {size} devices of the axis {CONTEXT!r} "
        "divide, but not of arrays that they divide"
        + (f": the batch has {whole}, which do not divide. " if whole else ". ")
        + f"{_WAITS} Shift tokens and targets in the batch, so that both have T; or take "
        "`schedule='circular'` or `engine='mpmd'`."
    )


def _share(dim: int, size: int, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if not is_divided(leaf.shape, dim, size):
        return leaf
    shape = *leaf.shape[:dim], leaf.shape[dim] // size, *leaf.shape[dim + 1 :]
    return jax.ShapeDtypeStruct(shape, leaf.dtype)
