"""Decides from the folder of a run where it resumes, before anything in the folder changes.

The rule: nothing that was ever saved is lost without a message. A run is refused if files in its
folder have changed since it wrote them; the error names the file and the key that allows the run to
resume. A state that a kill can leave is never refused. A resumed run has the data, the optimizer
and the learning rate of its checkpoint.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ..._durable import write_file
from ...models import ModelConfig
from ..checkpoint._digests import (
    DIGESTS_FILE,
    describe_corruption,
    find_corruption,
    has_digests,
    is_complete,
    quarantine,
    sha256_of,
    steps_in,
)
from ..checkpoint._init_from import CHECKPOINTS_FOLDER, check_same_sizes
from ..checkpoint._sealing import REMOVED_FOLDER, leftovers
from ..config._config import Config
from ..logs._metrics import METRICS_FILE, read_metrics
from ..plan._optimizer import learning_rate
from ..runtime._reading import is_folder, list_names, read_file
from ._run_history import fsync_history, read_saved, read_starts

_INCOMPLETE = re.compile(r"(\d+)\.incomplete(-\d+)?")

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


@dataclass(frozen=True)
class ResumePoint:
    """The state from which a run starts.

    Attributes:
        step: The step of the newest sound checkpoint; 0 if the run begins at step 1.
        metadata: The metadata of that checkpoint.
        corrupt: The checkpoints that are not sound, and the problems of each.
        leftovers: Partial folders that a killed run has left.
        begins_anew: Whether checkpoints are lost and the user asks to begin at step 1.
    """

    folder: Path
    step: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    corrupt: tuple[tuple[Path, list[str]], ...] = ()
    leftovers: tuple[Path, ...] = ()
    begins_anew: bool = False
    notes: tuple[str, ...] = ()


def find_resume_point(folder: Path, config: Config) -> ResumePoint:
    """Finds where a run resumes. Writes nothing."""
    checkpoints = folder / CHECKPOINTS_FOLDER
    if list_names(folder).count(CHECKPOINTS_FOLDER) and not is_folder(checkpoints):
        raise ValueError(
            f"{checkpoints} is not a folder, or a link to one that does not exist. Put the folder "
            "back, mount its disk, or choose another `run_name`."
        )
    read_starts(folder)  # a broken line is named before anything changes
    if not config.enable_checkpointing:
        _check_nothing_saved(folder, checkpoints)
        return ResumePoint(folder)
    newest_sound, corrupt = None, []
    for step in steps_in(checkpoints):
        problems = _problems(step, config.allow_unverified, quick=newest_sound is not None)
        if problems:
            corrupt.append((step, problems))
        elif newest_sound is None:
            newest_sound = step
    if newest_sound is None:
        lost = _evidence_of_checkpoints(folder, [step for step, _ in corrupt if has_digests(step)])
        if lost and not config.begin_anew:
            problems = " ".join(describe_corruption(*each) for each in corrupt[:1])
            raise ValueError(
                f"{checkpoints} has no checkpoint to go on from, but {lost}. {problems}".rstrip()
                + " Nothing has been changed. Mount its disk or put the checkpoints back; or give "
                "`begin_anew=true`, which begins at step 1 and keeps the old metrics beside the "
                "new."
            )
        return ResumePoint(
            folder, 0, {}, tuple(corrupt), tuple(leftovers(checkpoints)), begins_anew=bool(lost)
        )
    found_step, newest = int(newest_sound.name), read_saved(folder) or 0
    notes = ()
    if newest > found_step and str(newest) not in {step.name for step, _ in corrupt}:
        notes = (f"Step {newest} was saved, and {checkpoints} does not have it any more.",)
    old = [
        checkpoints / name
        for name in list_names(checkpoints)
        if (match := _INCOMPLETE.fullmatch(name)) and int(match[1]) < found_step
    ]
    metadata = _metadata_of(newest_sound)
    assert metadata is not None, "it has no problems"
    return ResumePoint(
        folder, found_step, metadata, tuple(corrupt), (*leftovers(checkpoints), *old), notes=notes
    )


def check_resume(
    point: ResumePoint,
    config: Config,
    *,
    sizes: ModelConfig,
    decided_by: Mapping[str, Any],
) -> list[str]:
    """Checks that a run resumes with its checkpoint's model, optimizer, data and learning rate."""
    saved = point.metadata
    where = f"{point.folder / CHECKPOINTS_FOLDER} step {point.step}"
    check_same_sizes(saved["model"], sizes, where)
    for name, (num_bytes, digest) in saved.get("files", {}).items():
        data = (read_file(point.folder / name) or b"")[:num_bytes]
        if sha256_of(data) != digest and not config.allow_unverified:
            raise ValueError(
                f"{point.folder / name} is not what it was when step {point.step} was saved: "
                "lines up to there are missing or have changed. Put the file back, or give "
                "`allow_unverified=true` to go on with what is there."
            )
    history = _metrics_up_to_checkpoint(point)
    if not history:
        read_metrics(point.folder / METRICS_FILE)  # raises if a line is broken
    warnings = [check_optimizer(saved.get("optimizer", ADAMW), config.named_optimizer, where)]
    if "data" in saved:
        warnings += [check_data(saved["data"], decided_by, allowed=config.allow_data_change)]
    if "schedule_steps" in saved:
        lines = map(json.loads, history.splitlines())
        skipped = sum(int(metrics.get("skipped", 0)) for metrics in lines)
        before = saved["schedule_steps"]
        warnings += [check_learning_rate(before, config, point.step, skipped=skipped)]
    return [warning for warning in warnings if warning]


def history_metadata(folder: Path, schedule_steps: int) -> dict[str, Any]:
    """Returns the metadata of a checkpoint that `check_resume` needs besides model and data."""
    return {"schedule_steps": schedule_steps, "files": fsync_history(folder)}


def clean_up(point: ResumePoint) -> list[str]:
    """Renames corrupt checkpoints and removes leftovers of kills."""
    said = list(point.notes)
    for step, problems in point.corrupt:
        why = "damaged" if is_complete(step) or has_digests(step) else "incomplete"
        aside = quarantine(step, why)
        said.append(
            f"{describe_corruption(step, problems)} It is left out, and kept as {aside.name}."
        )
    for path in point.leftovers:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
        what = "an old checkpoint" if path.parent.name == REMOVED_FOLDER else "a checkpoint"
        said.append(f"Removed {path}, a part of {what} that a kill had left.")
    return said


def truncate_metrics(point: ResumePoint) -> None:
    """Drops from `metrics.jsonl` what is behind the checkpoint, if that recorded where it ends."""
    if data := _metrics_up_to_checkpoint(point):
        write_file(point.folder / METRICS_FILE, data)


def _metrics_up_to_checkpoint(point: ResumePoint) -> bytes:
    """Returns the metrics up to a checkpoint, b"" if its digest of them is missing or differs."""
    num_bytes, digest = point.metadata.get("files", {}).get(METRICS_FILE, (0, ""))
    data = (read_file(point.folder / METRICS_FILE) or b"")[:num_bytes]
    return data if sha256_of(data) == digest else b""


def _problems(step: Path, allow_unverified: bool, *, quick: bool) -> list[str]:
    if is_complete(step) and not has_digests(step) and not quick and not allow_unverified:
        raise ValueError(
            f"{step / DIGESTS_FILE} is missing, empty or of an older version, so nothing says "
            f"whether {step} is still what was saved, or which step it is. Put the file back, move "
            "that folder away to go on from the checkpoint before, or give `allow_unverified=true` "
            "to go on from this one."
        )
    problems = find_corruption(step, quick=quick)
    if not problems and not quick and _metadata_of(step) is None:
        return ["its metadata is not a JSON object"]
    return problems


def _metadata_of(step: Path) -> dict[str, Any] | None:
    try:
        metadata = json.loads(read_file(step / "metadata" / "metadata") or b"")
    except (ValueError, RecursionError):
        return None
    return metadata if isinstance(metadata, dict) and "model" in metadata else None


def _evidence_of_checkpoints(folder: Path, corrupt: list[Path]) -> str:
    """Returns the evidence that a run without a sound checkpoint once had one, or ""."""
    if corrupt:
        return f"{len(corrupt)} that are corrupt"
    if newest := read_saved(folder):
        return f"the run has saved step {newest}"
    first = max((start["first_step"] for start in read_starts(folder)), default=1)
    if first > 1:
        return f"the run has gone on from step {first - 1}"
    if read_saved(folder) is not None or _had_no_checkpoints(folder):
        return ""
    lines = read_metrics(folder / METRICS_FILE)
    return f"{folder / METRICS_FILE} has {lines[-1]['step']} steps" if lines else ""


def _had_no_checkpoints(folder: Path) -> bool:
    """Returns whether `enable_checkpointing` was false at the last start of a run."""
    try:
        config = yaml.safe_load(read_file(folder / "config.yml") or b"")
    except (yaml.YAMLError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("enable_checkpointing") is False


def _check_nothing_saved(folder: Path, checkpoints: Path) -> None:
    steps = [int(step.name) for step in steps_in(checkpoints)]
    newest = max([*steps, read_saved(folder) or 0])
    if newest:
        raise ValueError(
            f"`enable_checkpointing` is false, and {folder} is of a run that has saved step "
            f"{newest}: this one would begin at step 1 and replace its metrics. Leave "
            "`enable_checkpointing` at true to go on, or choose another `run_name`."
        )


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


def check_learning_rate(before: int, config: Config, done: int, *, skipped: int = 0) -> str:
    """Checks that the learning rate does not jump because `steps` has changed.

    Of the steps that are done, those that were skipped have not moved the schedule.
    """
    if config.learning_rate_schedule_steps != -1:  # changed by hand, if at all
        return ""
    old, new = (
        np.asarray(learning_rate(config, num_steps=num_steps)(done - skipped)).item()
        for num_steps in (before, config.steps)
    )
    if abs(old - new) <= 1e-6 * max(old, new):
        return ""
    what = (
        f"The learning rate of step {done + 1} was to be {old:.6g} and would be {new:.6g}: the "
        f"schedule {config.learning_rate_schedule!r} had {before} steps and has as many as "
        f"`steps`, {config.steps}."
    )
    if not config.allow_learning_rate_change:
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
