"""Engines for models with several kinds of layers, such as an encoder before a decoder.

A stage may have layers of several kinds. An engine stores and runs the layers of each kind as if
there were no others: with a layout of its own, in which stages may have no layer. In one program
all stages run the same sequence of kinds, such as LLGLLG: one of which the layers of every stage
are a part, and a stage skips the slots that it has no layer for. Stages of one pattern skip none.
For `mpmd` a stage has the layers that it runs.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from itertools import groupby, islice, permutations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..autodiff.staged_model import Aux, Past
from ._engine import Engine, ParamSpecs, PipelineSpec
from .fsdp import is_rule

Runs = tuple[tuple[str, int, int], ...]
"""Consecutive layers of one kind: the kind, and its first and last slot among those of the kind."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OrderedKeys:
    """The keys of a stage by kind, in a program of its own, and the order of its layers."""

    by_kind: dict[str, PyTree]
    runs: Runs = field(metadata={"static": True})


def with_kinds(engine: Engine) -> Engine:
    """Returns an engine that also runs models whose layers are of several kinds.

    Returns:
        The engine. If the spec has kinds, its functions take trees and layers by kind, and its
        stages are trees by kind; in a list of stages each has the kinds that it runs. Random keys
        are those of all layers, in the order in which they run.
    """

    def stack(spec: PipelineSpec, layers: PyTree) -> PyTree:
        if not spec.kinds:
            return engine.storage.stack(spec, layers)
        specs = _specs_by_kind(engine, spec)
        return _stages(specs, {k: engine.storage.stack(specs[k], layers[k]) for k in specs})

    def unstack(spec: PipelineSpec, stages: PyTree) -> PyTree:
        if not spec.kinds:
            return engine.storage.unstack(spec, stages)
        specs = _specs_by_kind(engine, spec)
        return {kind: engine.storage.unstack(specs[kind], _of_kind(stages, kind)) for kind in specs}

    def layer_keys(spec: PipelineSpec, dropout: PyTree, frozen: PyTree) -> PyTree:
        if not spec.kinds:
            return engine.storage.layer_keys(spec, dropout, frozen)
        specs, order = _specs_by_kind(engine, spec), np.array(spec.kinds_of_layers)
        keys_by_kind = {}
        for kind, _ in spec.kinds:
            (ids,) = np.nonzero(order == kind)
            keys = jax.tree.map(lambda leaf: leaf[ids], dropout)  # noqa: B023
            is_list = isinstance(frozen, list)
            of_kind = [stage.get(kind) for stage in frozen] if is_list else frozen[kind]
            keys_by_kind[kind] = engine.storage.layer_keys(specs[kind], keys, of_kind)
        stages = _stages(specs, keys_by_kind)
        if not isinstance(stages, list):
            return stages
        runs = map(layer_runs, _patterns(spec))
        return [OrderedKeys(*pair) for pair in zip(stages, runs, strict=True)]

    def of_kinds(run: Callable[[PipelineSpec, Any], Callable]) -> Callable:
        """Returns `run`, which makes a stage of layers of one kind, for all kinds of a spec."""

        def stage(spec: PipelineSpec, layers: Any) -> Callable:
            if not spec.kinds:
                return run(spec, layers)
            specs = _specs_by_kind(engine, spec)

            def of_run(kind: str, num_layers: int, is_all: bool) -> Callable:
                return run(_spec_of_run(engine, specs[kind], num_layers, is_all), layers[kind])

            return _in_order(_common_runs(engine, spec), of_run)

        return stage

    return replace(
        engine,
        storage=replace(engine.storage, stack=stack, unstack=unstack, layer_keys=layer_keys),
        stage=of_kinds(engine.stage),
        sliced_stage=engine.sliced_stage and of_kinds(engine.sliced_stage),
    )


def _patterns(spec: PipelineSpec) -> list[tuple[str, ...]]:
    """Returns the kinds of the layers of every stage, in forward order."""
    order = spec.kinds_of_layers
    return [order[ids.start : ids.stop] for ids in spec.layout.stage_layer_ids]


def _common_runs(engine: Engine, spec: PipelineSpec) -> Runs | None:
    """Returns the runs that every stage of one program has; None if each has runs of its own."""
    return None if engine.storage.per_stage else layer_runs(common_sequence(_patterns(spec)))


def _specs_by_kind(engine: Engine, spec: PipelineSpec) -> dict[str, PipelineSpec]:
    """Returns the spec of each kind: with a layout of the layers of this kind alone."""
    patterns, num_ranks = _patterns(spec), spec.mesh.shape["stage"]
    sequence = () if engine.storage.per_stage else common_sequence(patterns)
    slots = [slots_by_kind(sequence, pattern) for pattern in patterns]
    specs = {}
    for kind, _ in spec.kinds:
        counts, num_slots = tuple(p.count(kind) for p in patterns), sequence.count(kind)
        layout = engine.layout(spec.schedule, num_ranks, counts)
        if sequence and set(counts) != {num_slots}:
            of_kind = tuple(of_stage.get(kind, ()) for of_stage in slots)
            layout = replace(layout, layers_per_stage=num_slots, counts=counts, slots=of_kind)
        of_kind = {
            "layout": layout,
            "param_specs": _specs_of_kind(spec.param_specs, kind),
            "compute_dtype": _dtype_of_kind(spec.compute_dtype, kind),
            "layer_specs": None if spec.layer_specs is None else spec.layer_specs[kind],
        }
        specs[kind] = replace(spec, kinds=(), order=(), **of_kind)
    return specs


def _spec_of_run(engine: Engine, spec: PipelineSpec, num_layers: int, is_all: bool) -> PipelineSpec:
    """Returns the spec of some layers of a kind, which are written out unless they are all."""
    scan = spec.scan_layers
    # In one program `counts` says that some slots are skipped.
    counts = None if engine.storage.per_stage else spec.layout.counts
    layout = replace(spec.layout, layers_per_stage=num_layers, counts=counts, slots=None)
    # A loop over a part of a stack would copy the part in every tick.
    return replace(spec, layout=layout, scan_layers=scan if is_all or scan is not None else False)


def _dtype_of_kind(dtype: Any, kind: str) -> Any:
    """Returns the rule of dtypes by paths of a model that has no other kind."""
    if not is_rule(dtype):
        return dtype
    return lambda path: dtype(path.replace("['layers']", f"['layers'][{kind!r}]", 1))


def _specs_of_kind(specs: ParamSpecs, kind: str) -> ParamSpecs:
    """Returns the specs of layers of a kind, by paths of a model that has no other."""
    start = f"['stages'][{kind!r}]"
    return tuple(
        (f"['stages']{name.removeprefix(start)}", spec)
        for name, spec in specs
        if name.startswith(start)
    )


def _stages(specs: dict[str, PipelineSpec], by_kind: dict[str, Any]) -> Any:
    """Returns stages by kind; or a list of stages, each with the kinds of which it has layers."""
    if not isinstance(next(iter(by_kind.values())), list):
        return by_kind
    ids = {kind: spec.layout.stage_layer_ids for kind, spec in specs.items()}
    return [
        {kind: stages[i] for kind, stages in by_kind.items() if len(ids[kind][i])}
        for i in range(len(next(iter(ids.values()))))
    ]


def _of_kind(stages: Any, kind: str) -> Any:
    if isinstance(stages, list):
        return [stage[kind] for stage in stages if kind in stage]
    return stages[kind]


StageOfRun = Callable[[str, int, bool], Callable]
"""`(kind, number of layers, whether these are all of the kind) -> stage` that runs them."""


def _in_order(common: Runs | None, stage_of_run: StageOfRun) -> Callable:
    """Returns a stage that runs its layers in order; without common runs they are in its keys.

    If it runs a slice, its last argument and result are the state, whose trees are by kind.
    """

    def stage(
        weights: dict[str, Any], x: PyTree, inputs_m: PyTree, keys: Any, *past: Past
    ) -> tuple[Any, ...]:
        sums: Aux = {}
        written: dict[str, list[Past]] = defaultdict(list)
        runs, keys = _runs_and_keys(common, keys)
        for kind, part in _parts(runs):
            run = stage_of_run(kind, part.last - part.first, part.is_all)
            of_run = [_past_of_run(before, kind, part) for before in past]
            x, aux, *new = run(
                part.take(weights[kind]), x, inputs_m, part.take(keys[kind]), *of_run
            )
            sums = _sum_by_name(sums, aux)
            written[kind] += new
        return x, sums, *(_past_of_all_runs(before, written) for before in past)

    return stage


def _past_of_run(past: Past, kind: str, part: "_Part") -> Past:
    return past if past.earlier is None else replace(past, earlier=part.take(past.earlier[kind]))


def _past_of_all_runs(past: Past, written: dict[str, list[Past]]) -> Past:
    """Returns the state of all layers, by kind, from those of the runs of each."""
    earlier = {kind: [of_run.earlier for of_run in runs] for kind, runs in written.items()}
    new = {kind: [of_run.new for of_run in runs] for kind, runs in written.items()}
    return replace(past, earlier=_concatenated(earlier), new=_concatenated(new))


def _runs_and_keys(common: Runs | None, keys: Any) -> tuple[Runs, dict[str, PyTree]]:
    if common is not None:
        return common, keys
    assert isinstance(keys, OrderedKeys)
    return keys.runs, keys.by_kind


class _Part(NamedTuple):
    """Some of the layers of a kind."""

    first: int
    last: int
    is_all: bool

    def take(self, tree: PyTree) -> PyTree:
        """Takes these layers of [n, ...] leaves."""
        return tree if self.is_all else jax.tree.map(lambda x: x[self.first : self.last], tree)


def _parts(runs: Runs) -> Iterator[tuple[str, _Part]]:
    """Yields the kind and the layers of every run."""
    counts = {kind: last for kind, _, last in runs}  # slots of each kind
    for kind, first, last in runs:
        yield kind, _Part(first, last, is_all=last - first == counts[kind])


def _concatenated(parts: Mapping[str, list[PyTree]]) -> dict[str, PyTree]:
    """Returns the layers of every kind, from those of its runs."""
    return {
        kind: trees[0] if len(trees) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *trees)
        for kind, trees in parts.items()
    }


def _sum_by_name(sums: Aux, aux: Aux) -> Aux:
    return sums | {name: sums[name] + v if name in sums else v for name, v in aux.items()}


def layer_runs(sequence: Sequence[str]) -> Runs:
    """Returns the runs of a stage whose layers are of these kinds.

    Example:
        >>> layer_runs("LLGL")
        (('L', 0, 2), ('G', 0, 1), ('L', 2, 3))
    """
    done: dict[str, int] = {}
    runs = []
    for kind, group in groupby(sequence):
        first = done.get(kind, 0)
        done[kind] = first + len(list(group))
        runs.append((kind, first, done[kind]))
    return tuple(runs)


def common_sequence(patterns: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Returns a short sequence of kinds of which every pattern is a part, in order.

    It is shortest for two different patterns. More are joined pair by pair, in several orders.

    Args:
        patterns: The kinds of the layers of every stage, in forward order.

    Returns:
        The kinds of the slots of a stage.

    Example:
        >>> "".join(common_sequence(["LL", "GL", "LG", "LL"]))
        'LGL'
    """
    return _common_sequence(tuple(sorted({tuple(pattern) for pattern in patterns})))


@lru_cache
def _common_sequence(patterns: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    several = islice(permutations(patterns), _MAX_ORDERS)
    return min((reduce(_shortest_common, order) for order in several), key=len)


_MAX_ORDERS = 120
"""All orders of up to five patterns."""


def _shortest_common(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[str, ...]:
    # length[i][j] is that of the shortest sequence of which a[i:] and b[j:] are parts.
    length = [[len(a) - i + len(b) - j for j in range(len(b) + 1)] for i in range(len(a) + 1)]
    for i in reversed(range(len(a))):
        for j in reversed(range(len(b))):
            is_same = a[i] == b[j]
            length[i][j] = 1 + (
                length[i + 1][j + 1] if is_same else min(length[i + 1][j], length[i][j + 1])
            )
    i = j = 0
    sequence: list[str] = []
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            sequence, i, j = [*sequence, a[i]], i + 1, j + 1
        elif length[i + 1][j] <= length[i][j + 1]:
            sequence, i = [*sequence, a[i]], i + 1
        else:
            sequence, j = [*sequence, b[j]], j + 1
    return (*sequence, *a[i:], *b[j:])


def slots_by_kind(sequence: Sequence[str], pattern: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Returns the slots of a stage's layers among those of their kind in the common sequence.

    Example:
        >>> slots_by_kind("LLGL", "LGL")
        {'L': (0, 2), 'G': (0,)}
    """
    slots: dict[str, list[int]] = {kind: [] for kind in sequence}
    passed, layers = dict.fromkeys(sequence, 0), iter(pattern)
    next_kind = next(layers, None)
    for kind in sequence:
        if kind == next_kind:
            slots[kind].append(passed[kind])
            next_kind = next(layers, None)
        passed[kind] += 1
    return {kind: tuple(of_kind) for kind, of_kind in slots.items()}
