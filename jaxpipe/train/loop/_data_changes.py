"""Checks that a resumed run has the data, optimizer and learning rate of its checkpoint."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..plan._state_plan import LearningRate

_NAMES = {
    "rows": "the number of rows in a batch",
    "length": "`max_target_length`",
    "packing": "`packing`",
    "seed": "`data_shuffle_seed`",
    "vocabulary": "`vocab_size`",
    "tokenizer": "the tokenizer",
}
"""How errors name the entries of `Batches.decided_by`."""

ADAMW: Mapping[str, Any] = {"name": "adamw", "arguments": {}}
"""The optimizer of checkpoints that do not name one."""


def data_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns texts such as "`packing` was True and is False"; none if the data is the same."""
    kinds = ["files" if "sources" in x else "random tokens" for x in (before, now)]
    changes = []
    if kinds[0] != kinds[1]:
        changes = [f"`dataset_type` was for {kinds[0]} and is for {kinds[1]}"]
        both = before.keys() & now.keys()
        before, now = ({k: v for k, v in x.items() if k in both} for x in (before, now))
    if "tokenizer" not in before or "tokenizer" not in now:  # files of tokens need none
        before, now = ({k: v for k, v in x.items() if k != "tokenizer"} for x in (before, now))
    was, now_is = dict(_flatten(before)), dict(_flatten(now))
    names = [*now_is, *(name for name in was if name not in now_is)]
    return changes + [
        f"{_readable_name(name)} was {_value(was, name)} and is {_value(now_is, name)}"
        for name in names
        if was.get(name) != now_is.get(name)
    ]


def check_data(before: Mapping[str, Any], now: Mapping[str, Any], *, allowed: bool) -> str:
    """Checks that a run resumes with the data of its checkpoint."""
    changes = "; ".join(data_changes(before, now))
    if not changes:
        return ""
    what = f"The data is not that of the checkpoint: {changes}."
    if not allowed:
        raise ValueError(
            f"{what} Some rows would be repeated, and others left out. Give the old values, or "
            "`allow_data_change=true` to go on with the rows that this data has at the next step."
        )
    return f"warning: {what} The run goes on with the rows that this data has at the next step."


def check_optimizer(before: Mapping[str, Any], now: Mapping[str, Any], where: str) -> str:
    """Checks that a run resumes with the optimizer of its checkpoint."""
    if before["name"] != now["name"]:
        raise ValueError(
            f"{where} has the state of the optimizer {before['name']!r}, and `optimizer` is "
            f"{now['name']!r}, which has another. Give `optimizer={before['name']}` to go on; or "
            "choose another `run_name`, and begin with these weights by `init_from`."
        )
    if before["arguments"] == now["arguments"]:
        return ""
    return (
        f"warning: `optimizer_arguments` was {before['arguments']} and is {now['arguments']}. The "
        "run goes on with the state of the former."
    )


def check_learning_rate(
    before: int, rate: LearningRate, done: int, *, skipped: int = 0, allowed: bool
) -> str:
    """Checks that the learning rate does not jump because `steps` has changed.

    Of the steps that are done, those that were skipped have not moved the schedule.
    """
    if not rate.follows_run:  # changed by hand, if at all
        return ""
    old, new = (
        np.asarray(rate.schedule(num_steps)(done - skipped)).item()
        for num_steps in (before, rate.num_steps)
    )
    if abs(old - new) <= 1e-6 * max(old, new):
        return ""
    what = (
        f"The learning rate of step {done + 1} was to be {old:.6g} and would be {new:.6g}: the "
        f"schedule {rate.shape!r} had {before} steps and has as many as "
        f"`steps`, {rate.num_steps}."
    )
    if not allowed:
        raise ValueError(
            f"{what} Give `learning_rate_schedule_steps={before}` to go on without a jump, or "
            "`allow_learning_rate_change=true` to go on with it."
        )
    return f"warning: {what}"


def _readable_name(name: str) -> str:
    if match := re.fullmatch(r"weights\[(\d+)\]", name):
        return f"the weight of source {match[1]}"
    if match := re.fullmatch(r"sources\[(\d+)\]\.(\w+)", name):
        return f"`{match[2]}` of source {match[1]}"
    return _NAMES.get(name, f"`{name}`")


def _value(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return "not there"
    return "none (not shuffled)" if values[name] is None else str(values[name])


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Numbers and words by their paths, such as `sources[0].tokens`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _flatten(inner, f"{name}[{i}]")
    else:
        yield name, value
