"""Engines for models with several kinds of layers in a row, such as an encoder before a decoder.

A stage may have layers of several kinds. An engine stores and runs the layers of each kind as if
there were no others: with a layout of its own, in which stages may have no layer. In one program
every stage has room for the largest number of layers of each kind that any stage has; for `mpmd` a
stage has the layers that it runs.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jaxtyping import PyTree

from ..autodiff.staged_model import Aux, Past, with_aux
from ._engine import Engine, ParamSpecs, PipelinePlan
from .fsdp import is_rule


def with_kinds(engine: Engine) -> Engine:
    """Returns an engine that also runs models whose layers are of several kinds.

    Returns:
        The engine. If the plan has kinds, its functions take trees and layers by kind, and its
        stages are trees by kind; in a list of stages each has the kinds that it runs. Random keys
        are those of all layers, in the order in which they run.
    """

    def stack(plan: PipelinePlan, layers: PyTree) -> PyTree:
        if not plan.kinds:
            return engine.stack(plan, layers)
        plans = _plans(engine, plan)
        return _stages(plans, {k: engine.stack(plans[k], layers[k]) for k in plans})

    def unstack(plan: PipelinePlan, stages: PyTree) -> PyTree:
        if not plan.kinds:
            return engine.unstack(plan, stages)
        plans = _plans(engine, plan)
        return {kind: engine.unstack(plans[kind], _of_kind(stages, kind)) for kind in plans}

    def layer_keys(plan: PipelinePlan, dropout: PyTree, frozen: PyTree) -> PyTree:
        if not plan.kinds:
            return engine.layer_keys(plan, dropout, frozen)
        plans, keys_by_kind, first = _plans(engine, plan), {}, 0
        for kind, count in plan.kinds:
            keys = jax.tree.map(lambda leaf: leaf[first : first + count], dropout)  # noqa: B023
            is_list = isinstance(frozen, list)
            of_kind = [stage.get(kind) for stage in frozen] if is_list else frozen[kind]
            keys_by_kind[kind], first = engine.layer_keys(plans[kind], keys, of_kind), first + count
        return _stages(plans, keys_by_kind)

    def stage(plan: PipelinePlan, layers: Any) -> Callable:
        if not plan.kinds:
            return engine.stage(plan, layers)
        plans = _plans(engine, plan)
        return _in_order({k: engine.stage(plans[k], layers[k]) for k in plans})

    def sliced_stage(plan: PipelinePlan, layers: Any) -> Callable:
        assert engine.sliced_stage is not None
        if not plan.kinds:
            return engine.sliced_stage(plan, layers)
        plans = _plans(engine, plan)
        return _slices_in_order({k: engine.sliced_stage(plans[k], layers[k]) for k in plans})

    return replace(
        engine,
        stack=stack,
        unstack=unstack,
        layer_keys=layer_keys,
        stage=stage,
        sliced_stage=sliced_stage if engine.sliced_stage else None,
    )


def _plans(engine: Engine, plan: PipelinePlan) -> dict[str, PipelinePlan]:
    """Returns the plan of each kind: with a layout of the layers of this kind alone."""
    plans, first, num_ranks = {}, 0, plan.mesh.shape["stage"]
    for kind, count in plan.kinds:
        last = first + count
        counts = tuple(
            max(0, min(ids.stop, last) - max(ids.start, first))
            for ids in plan.layout.stage_layer_ids
        )
        layout = engine.layout(plan.schedule, num_ranks, counts)
        of_kind = {
            "layout": layout,
            "param_specs": _specs_of_kind(plan.param_specs, kind),
            "compute_dtype": _dtype_of_kind(plan.compute_dtype, kind),
            "layer_specs": None if plan.layer_specs is None else plan.layer_specs[kind],
        }
        plans[kind] = replace(plan, kinds=(), **of_kind)
        first = last
    return plans


def _dtype_of_kind(dtype: Any, kind: str) -> Any:
    """Returns the rule of dtypes by paths of a model that has no other kind."""
    if not is_rule(dtype):
        return dtype
    return lambda path: dtype(path.replace("['layers']", f"['layers']['{kind}']", 1))


def _specs_of_kind(specs: ParamSpecs, kind: str) -> ParamSpecs:
    """Returns the specs of layers of a kind, by paths of a model that has no other."""
    start = f"['stages']['{kind}']"
    return tuple(
        (f"['stages']{name.removeprefix(start)}", spec)
        for name, spec in specs
        if name.startswith(start)
    )


def _stages(plans: dict[str, PipelinePlan], by_kind: dict[str, Any]) -> Any:
    """Returns stages by kind; or a list of stages, each with the kinds of which it has layers."""
    if not isinstance(next(iter(by_kind.values())), list):
        return by_kind
    ids = {kind: plan.layout.stage_layer_ids for kind, plan in plans.items()}
    return [
        {kind: stages[i] for kind, stages in by_kind.items() if len(ids[kind][i])}
        for i in range(len(next(iter(ids.values()))))
    ]


def _of_kind(stages: Any, kind: str) -> Any:
    if isinstance(stages, list):
        return [stage[kind] for stage in stages if kind in stage]
    return stages[kind]


def _in_order(stages: dict[str, Callable]) -> Callable:
    """Returns a stage that runs its layers of the first kind, then those of the next one."""

    def stage(weights: dict[str, Any], x: PyTree, inputs_m: PyTree, keys: Any) -> tuple[Any, Aux]:
        sums: Aux = {}
        for kind, run in stages.items():
            if kind in weights:
                x, aux = with_aux(run)(weights[kind], x, inputs_m, keys[kind])
                sums = _sum_by_name(sums, aux)
        return x, sums

    return stage


def _slices_in_order(stages: dict[str, Callable]) -> Callable:
    """Returns a sliced stage with layers of several kinds, whose state is a tree by kind."""

    def stage(
        weights: dict[str, Any], x: PyTree, inputs_m: PyTree, keys: Any, past: Past
    ) -> tuple[Any, Aux, Past]:
        sums, earlier, new = {}, {}, {}
        for kind, run in stages.items():
            if kind not in weights:
                continue
            of_kind = None if past.earlier is None else past.earlier[kind]
            past_of_kind = replace(past, earlier=of_kind)
            x, aux, new_past = run(weights[kind], x, inputs_m, keys[kind], past_of_kind)
            sums, earlier[kind], new[kind] = _sum_by_name(sums, aux), new_past.earlier, new_past.new
        return x, sums, replace(past, earlier=earlier, new=new)

    return stage


def _sum_by_name(sums: Aux, aux: Aux) -> Aux:
    return sums | {name: sums[name] + v if name in sums else v for name, v in aux.items()}
