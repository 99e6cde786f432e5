"""Initializes a run from the weights of `init_from`, with a new optimizer state."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from ..._input import MAX_JSON_BYTES, is_file
from ...models import ModelConfig
from ...models.weights import weight_shapes
from ..optim._factories import averages_weights
from ..plan._optimizer import make_optimizer
from ..plan._setup import StepPlan
from ..plan._weight_plan import WeightPlan
from ..runtime._multihost import broadcast_from_first
from ..runtime._reading import is_folder, list_names
from ..step._optimizer_state import reads_weights
from ..step._state import TrainState
from ..step._step import init_state, stored_shardings
from . import _store
from ._canonical import (
    canonical_shapes,
    first_optimizer_state,
    state_from_canonical,
    with_layers_after,
)
from ._digests import DIGESTS_FILE, describe_corruption, find_corruption, has_digests, is_complete

CHECKPOINTS_FOLDER = "checkpoints"
WEIGHTS_FOLDER = "weights"
"""Folders of a run, and of `jaxpipe convert`."""

NOT_COMPUTED = ("load_balance_loss_weight",)
"""Sizes that change how a model is trained, and not what it computes."""

_ADVICE = "Give the sizes it was saved with: `config.yml` in that folder has them."


def first_state(
    plan: StepPlan, init_from: str = "", *, allow_unverified: bool = False
) -> TrainState:
    """Returns the state before step 1, with weights of the folder `init_from`, or of the seed."""
    if not init_from:
        return init_state(plan)
    folder = checkpoints_folder(Path(init_from))
    with _store.open_checkpoints_read_only(folder) as checkpoints:
        step = verified_step(checkpoints, None, allow_unverified=allow_unverified)
        step = broadcast_from_first(step)
        metadata = _store.read_metadata(checkpoints, step)
        as_saved = with_layers_after(plan.state, metadata.get("layers_after", 0))
        shapes = canonical_shapes(as_saved)["weights"]
        where = f"`init_from` is {init_from!r}: {checkpoints.directory} step {step}"
        check_saved_weights(checkpoints, step, metadata, as_saved.weights, where)
        state = init_state(plan)
        del state["weights"]  # room for the others
        reads = reads_weights(plan.state, make_optimizer(plan.state))
        if reads:
            del state["optimizer"]  # it is of the weights of the seed
        canonical = {"weights": _store.restore_weights(checkpoints, step, shapes)}
    if reads:
        canonical = first_optimizer_state(plan.state, canonical["weights"])
    return state | state_from_canonical(plan.state, stored_shardings(plan), canonical)


def check_saved_weights(
    checkpoints: ocp.CheckpointManager,
    step: int,
    metadata: Mapping[str, Any],
    weights: WeightPlan,
    where: str,
) -> None:
    """Checks that a step has the weights of a model, with as many layers after its pipeline."""
    model = weights.on_one_stage(weights.num_layers_after).canonical
    saved = _store.saved_leaf_specs(checkpoints, step, "weights")
    _store.check_same_leaves(
        _as_restored(saved, weights.dtype),
        _store.leaf_specs(weight_shapes(model)),
        where,
        _ADVICE,
    )
    check_same_sizes(metadata["model"], weights.sizes, where, _ADVICE, ignored=NOT_COMPUTED)
    check_not_to_average(metadata, where)


def check_not_to_average(metadata: Mapping[str, Any], where: str) -> None:
    """Refuses weights of a checkpoint that are not the model, but what it is averaged from."""
    name = metadata.get("optimizer", {}).get("name", "")
    if averages_weights(name):
        raise ValueError(
            f"{where} has weights of {name}, at which gradients were taken; the model is an "
            "average of them, which is not saved. Compute it from the checkpoint's weights and "
            "optimizer state with `optax.contrib.schedule_free_eval_params`."
        )


def _as_restored(saved: _store.LeafSpecs, weight_dtype: str) -> _store.LeafSpecs:
    """Returns `saved` with the dtypes it is restored in: bfloat16 may be widened to float32."""
    if weight_dtype != "float32":
        return saved
    return {
        name: (shape, "float32" if dtype == "bfloat16" else dtype)
        for name, (shape, dtype) in saved.items()
    }


def checkpoints_folder(folder: Path) -> Path:
    """Returns the folder of checkpoints of a run or, named `weights`, of `jaxpipe convert`."""
    for name in (CHECKPOINTS_FOLDER, WEIGHTS_FOLDER):
        if is_folder(folder / name):
            list_names(folder / name)  # which orbax would fail to without a word on why
            _check_regular(folder / name)
            return folder / name
    raise ValueError(
        f"{folder} has neither `{CHECKPOINTS_FOLDER}` nor `{WEIGHTS_FOLDER}`. Give the folder "
        "of a run, or one that `jaxpipe convert` made."
    )


def _check_regular(folder: Path) -> None:
    """Checks that Orbax can read the files of checkpoints in bounded time and memory."""
    for file in folder.rglob("*"):
        if not file.is_dir() and not is_file(file):
            raise ValueError(f"{file} is a device, a pipe or a broken link. Copy the folder again.")
        is_metadata = "METADATA" in file.name.upper() or file.suffix == ".json"
        if is_metadata and file.is_file() and file.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"{file} has more than {MAX_JSON_BYTES:,} bytes. Copy it again.")


def verified_step(
    checkpoints: ocp.CheckpointManager, step: int | None, *, allow_unverified: bool = False
) -> int:
    """Returns a step, or the newest complete one, after it has passed all checks."""
    folder = Path(checkpoints.directory)
    steps = [s for s in checkpoints.all_steps() if is_complete(folder / str(s))]
    if step is None and steps:
        step = max(steps)
    if step is None or step not in steps:
        there = ", ".join(map(str, sorted(steps))) or "none"
        missing = "any step" if step is None else f"step {step}"
        raise ValueError(f"{checkpoints.directory} does not have {missing}. It has: {there}.")
    saved = folder / str(step)
    if not has_digests(saved) and not allow_unverified:
        raise ValueError(
            f"{saved / DIGESTS_FILE} is missing, empty or of an older version, so nothing says "
            "whether the checkpoint is still what was saved. Put the file back, give another step, "
            "or allow this one: `allow_unverified=true` of `jaxpipe train`, `--allow-unverified` "
            "of `jaxpipe convert` and `jaxpipe sample`."
        )
    if problems := find_corruption(saved):
        raise ValueError(
            f"{describe_corruption(saved, problems)} Give another step, or copy it again."
        )
    return step


def check_same_sizes(
    saved: Mapping[str, Any],
    sizes: ModelConfig,
    where: str,
    advice: str = "Use the config it was saved with, or another `run_name`.",
    *,
    ignored: tuple[str, ...] = (),
) -> None:
    """Checks that sizes of a checkpoint are those of a run; new keys count as their defaults."""
    fields = dataclasses.fields(sizes)
    defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    saved_sizes = defaults | dict(saved)
    differing = [
        f"{key} is {saved_sizes.get(key)!r} in the checkpoint, {value!r} in the config"
        for key, value in dataclasses.asdict(sizes).items()
        if saved_sizes.get(key) != value and key not in ignored
    ]
    if differing:
        raise ValueError(
            f"{where} is of another model:\n  " + "\n  ".join(differing) + f"\n{advice}"
        )
