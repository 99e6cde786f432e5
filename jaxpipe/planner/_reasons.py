"""The words of an answer: a layout in one line, why it is the best, and what its time rests on."""

import re
from collections.abc import Iterable

from ..cost.training_step import OWN_MEMORY, OWN_PROGRAMS, evidence
from ..engines import usual_engine
from ..sharding import AXES
from ._candidates import StepLayout, engine_named
from ._devices import device_hardware
from ._model import OFFLOAD_INPUTS
from ._request import MANY_SCORES, Request
from ._search import CLOSE, BestPlans, Plan, RefusedLayout, is_plain

_GB = 1e9
_NOTABLE = 0.02  # the fraction of a step from which an answer names what takes it
_NAMES = {"stage": "pp", "data": "data", "fsdp": "fsdp", "tensor": "tp", "expert": "ep"}
_NAMES["context"] = "cp"


def describe(candidate: StepLayout) -> str:
    """Returns a layout in one line."""
    mesh = zip(AXES, candidate.mesh, strict=True)
    words = [f"{_NAMES[axis]} {size}" for axis, size in mesh if size > 1]
    if candidate.across:
        words.append(f"slices along {_NAMES[candidate.across]}")
    if not candidate.engine.pipelines:
        words.append("no pipeline")
    else:
        name, engine = candidate.family_name, candidate.engine
        words.append(name if engine is usual_engine(name) else f"{name} by {engine.name}")
        words.append(f"v {candidate.chunks}")
        if len(set(candidate.counts)) > 1:
            words.append(f"{min(candidate.counts)} to {max(candidate.counts)} layers a stage")
    words.append(f"M {candidate.microbatches}")
    if candidate.engine.pipelines and candidate.gathers:
        words.append(f"gather per {candidate.gather}".replace("per once", "once"))
    options = candidate.options
    words += ["ZeRO-1"] * options.zero1 + ["loss on all ranks"] * options.vocab_parallel
    scope = {"tick": "ticks", "layer": "layers", "both": "ticks and layers"}[candidate.scope]
    if candidate.policy == OFFLOAD_INPUTS:
        return ", ".join([*words, "remat full of layers, inputs on the host"])
    return ", ".join([*words, f"remat {candidate.policy} of {scope}"])


def binding(request: Request, plans: BestPlans) -> str:
    """Returns the constraint that keeps the best plan from being faster."""
    best, limit, beyond = plans.plans[0], request.limit, plans.beyond
    fastest = min(plan.time.seconds for plan in plans.plans)
    if beyond is not None and beyond[0] < 0.99 * fastest:
        return (
            f"memory. The fastest layout that does not fit would take about {beyond[0]:.3g} s and "
            f"{beyond[1].total / _GB:.1f} GB, most of it {beyond[1].largest}; "
            f"{limit / _GB:.1f} GB may be used."
        )
    scores = best.time.parts["attention_scores"]
    waits = {"bubble": best.time.parts["bubble"], **best.time.exposed, "scores": scores}
    name, seconds = max(waits.items(), key=lambda pair: pair[1])
    if seconds < _NOTABLE * best.time.seconds:
        other = best.time.parts["other_compute"]
        if other > best.time.parts["products"]:
            share = other / best.time.seconds
            return (
                f"what is beside matrix products, such as norms and sums: {share:.0%} of the step."
            )
        return f"matrix products: no waiting takes {_NOTABLE:.0%} of the step."
    labels = {"bubble": "the bubble", "scores": "attention's scores"}
    label = labels.get(name, f"communication of {name.replace('_', ' ')}")
    return f"{label}, {seconds:.3g} s of {best.time.seconds:.3g}."


def attention_words(best: Plan) -> str:
    """Returns a line about attention that no kernel computes; "" if it takes little."""
    seconds, step = best.time.parts["attention_scores"], best.time.seconds
    if seconds < _NOTABLE * step:
        return ""
    return (
        "no kernel computes it for this model and these devices. Its scores go to memory and "
        f"back, {seconds:.3g} s of {step:.3g}."
    )


def runner_up(plans: BestPlans) -> str:
    """Returns the reason that the second plan is not the first."""
    if len(plans.plans) < 2:
        return ""
    first, second = plans.plans[:2]
    more = second.time.seconds - first.time.seconds
    if more < 0 and -more > 0.001 * first.time.seconds:
        return (
            f"it is predicted {-more / first.time.seconds:.1%} faster, and 1 is simpler. Of "
            f"published layouts that are predicted within {CLOSE:.0%} of each other, half are in "
            "the right order: measure both."
        )
    if more < 0.001 * first.time.seconds:
        memory = (second.memory.total - first.memory.total) / _GB
        return f"it is as fast, and needs {abs(memory):.2f} GB {'more' if memory > 0 else 'less'}."
    parts = {name: second.time.parts[name] - first.time.parts[name] for name in first.time.parts}
    name = max(parts, key=parts.__getitem__)
    return (
        f"it takes {more:.3g} s more, {more / first.time.seconds:.1%}: most of it is "
        f"{name.replace('_', ' ')}, {second.time.parts[name]:.3g} s against "
        f"{first.time.parts[name]:.3g}."
    )


def plain_words(request: Request, plans: BestPlans) -> str:
    """Returns a line about data parallelism alone; "" if it is the best plan."""
    best, plain = plans.plans[0], plans.plain
    if is_plain(best.candidate):
        return ""
    if plain is not None:
        slower = plain.time.seconds / best.time.seconds - 1
        change = f"{abs(slower):.0%} {'less' if slower < 0 else 'more'}"
        return f"{describe(plain.candidate)} would take {plain.time.seconds:.3g} s, {change}."
    if plans.leanest_plain is None:
        fixed = request.space.fixed
        divided = any(fixed.get(axis, 1) > 1 for axis in ("stage", "tensor", "expert", "context"))
        pipelined = "engine" in fixed and engine_named(fixed["engine"]).pipelines
        if unread := request.space.unread_by.get(usual_engine(None).config_name):
            keys = " and ".join(f"`{key}`" for key in unread)
            return f"ruled out by {keys}, which a step without a pipeline does not read."
        of_pipelines = any(fixed.get(name) for name in ("schedule", "counts"))
        of_pipelines |= fixed.get("chunks", 1) > 1 or fixed.get("remat") == "full"
        if divided or pipelined or of_pipelines:
            return "what is given rules out data parallelism alone."
        return "rows or devices do not divide for data parallelism alone."
    candidate, needed = plans.leanest_plain
    if needed.total <= request.limit:
        many = request.stores_many_scores(candidate)
        refused = f"{request.checked_by} refuses it"
        reason = f"attention would store {MANY_SCORES}" if many else refused
        return f"data parallelism alone fits, but {reason}."
    return (
        f"data parallelism alone does not fit: {describe(candidate)} needs "
        f"{needed.total / _GB:.1f} GB of {request.limit / _GB:.1f}, most of it {needed.largest}."
    )


def refusals(refused: Iterable[RefusedLayout]) -> list[RefusedLayout]:
    """Returns at most three, with errors that differ in more than numbers."""
    first: dict[str, RefusedLayout] = {}
    for layout in refused:
        first.setdefault(re.sub(r"\d+", "", layout.error), layout)
    return list(first.values())[:3]


def refused_words(request: Request, plans: BestPlans) -> str:
    """Returns the number of faster layouts that are refused, and errors; "" if there are none."""
    best = plans.plans[0].time.seconds
    faster = [layout for layout in plans.refused if layout.seconds < best]
    if not faster:
        return ""
    lines = [f"    {describe(one.candidate)}: {one.error}" for one in refusals(faster)]
    head = f"{len(faster)} layouts that might be faster, by {request.checked_by}, such as"
    return "\n".join([head, *lines])


def rests_on(request: Request, plan: Plan) -> str:
    """Returns the published steps that a predicted time rests on, and the range that they leave."""
    device = device_hardware(request.devices)
    if device.kind == "cpu":
        return "nothing: on CPUs times rank plans, and are no prediction."
    if request.source.is_own and request.devices.platform == "tpu":
        own, (least, most) = OWN_PROGRAMS, OWN_MEMORY
        low, high = (plan.time.seconds * bound for bound in (own.low, own.high))
        return (
            f"{own.rows} programs of other models of functions until {own.last}, {own.pipelined} "
            f"of them with a pipeline: by XLA's cycles they took {own.low:.2f} to {own.high:.2f} "
            f"of what is predicted, so {low:.3g} to {high:.3g} s, and {least:.1f} to {most:.1f} of "
            "the memory."
        )
    has_experts = any(layer.num_experts for layer in request.work.layers)
    rows = evidence(device, has_experts=has_experts)
    models = "models with experts" if has_experts else "models without experts"
    low, high = (plan.time.seconds * bound for bound in (rows.low, rows.high))
    seconds = f"so {low:.3g} to {high:.3g} s"
    if not rows.rows:
        others = f"by those of other {'GPUs' if device.is_gpu else 'TPUs'}, {seconds}"
        return f"no published step of a {device.kind} with {models}; {others}."
    until = f" until {rows.last}" if rows.last else ""
    pipelined = f"{rows.pipelined or 'none'} of them with a pipeline"
    own = " Your own model is like none of them." if request.source.is_own else ""
    return (
        f"{rows.rows} published steps of {models}{until}, {pipelined}: they took {rows.low:.2f} to "
        f"{rows.high:.2f} of what is predicted, {seconds}.{own}"
    )
