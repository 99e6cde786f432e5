"""Checkpoints: a thin layer over orbax that refuses to load another model, and says why.

A step's folder holds `state`, a pytree of arrays, and `metadata`, a JSON object. Arrays are stored
by name without their layout, so a state loads into any sharding.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from ..runtime._multihost import broadcast_from_first, is_first_process
from ..runtime._stop import RunError
from ._digests import is_complete, quarantine, steps_in
from ._sealing import REMOVED_FOLDER, empty_removed, sealed_path_class

LeafSpecs = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of every leaf, by its path."""

MAX_LISTED = 8


def open_checkpoints(
    folder: str | PathLike[str],
    *,
    max_to_keep: int | None,
    asynchronous: bool,
    keep_best: int = 0,
    on_saved: Callable[[int], None] = lambda step: None,
) -> ocp.CheckpointManager:
    """Opens, or makes, a folder of checkpoints. Close it, or use it in a `with`, to flush saves.

    What a killed run left of a step is ignored: a step is written under another name and gets its
    own when it is complete, has its digests and is on the disk; and it loses that name before it is
    removed. A step's folder that is incomplete all the same (a copy that broke off) is renamed to
    `<step>.incomplete`. The first process calls `on_saved` with every complete step, maybe from
    another thread; `keep_best` steps with the least loss stay beside the newest.
    """
    path = Path(folder).absolute()
    path.mkdir(parents=True, exist_ok=True)
    _use_steady_clock()
    if is_first_process():
        _quarantine_incomplete(path)
    newest = ocp.checkpoint_managers.LatestN(max_to_keep)
    policies = (newest, _Best(keep_best)) if keep_best else (newest,)
    return ocp.CheckpointManager(
        path,
        options=ocp.CheckpointManagerOptions(
            temporary_path_class=sealed_path_class(on_saved),
            todelete_subdir=REMOVED_FOLDER,
            preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(policies),
            best_fn=_loss_of if keep_best else None,  # without one orbax keeps no metrics
            best_mode="min",
            enable_async_checkpointing=asynchronous,
        ),
        item_handlers=_handlers(),
    )


def open_checkpoints_read_only(folder: str | PathLike[str]) -> ocp.CheckpointManager:
    """Opens the checkpoints of another run, which may still be saving, and changes nothing."""
    options = ocp.CheckpointManagerOptions(read_only=True)
    return ocp.CheckpointManager(
        Path(folder).absolute(), options=options, item_handlers=_handlers()
    )


def _handlers() -> dict[str, ocp.CheckpointHandler]:
    return {"state": ocp.StandardCheckpointHandler(), "metadata": ocp.JsonCheckpointHandler()}


# Not orbax's `BestN`: it sorts NaN, and counts steps that have no loss.
@dataclass(frozen=True)
class _Best:
    """Keeps the steps with the least `eval_loss`, of those where that is a number."""

    count: int

    def should_preserve(
        self,
        checkpoints: Sequence[Any],  # orbax's type is a protocol that beartype cannot check
        *,
        context: ocp.checkpoint_managers.PreservationContext,
    ) -> Sequence[bool]:
        del context
        losses = [_loss_of(checkpoint.metrics or {}) for checkpoint in checkpoints]
        by_loss = sorted(range(len(losses)), key=lambda i: losses[i])
        preserved = {i for i in by_loss[: self.count] if math.isfinite(losses[i])}
        return [i in preserved for i in range(len(losses))]


def _loss_of(metrics: Mapping[str, float]) -> float:
    loss = metrics.get("eval_loss", math.inf)
    return loss if math.isfinite(loss) else math.inf


def latest_step(checkpoints: ocp.CheckpointManager) -> int | None:
    """Returns the newest complete step, or None if there is none.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with open_checkpoints(folder, max_to_keep=None, asynchronous=False) as checkpoints:
        ...         save_checkpoint(checkpoints, 5, {"w": np.zeros(2)}, {})
        ...         latest_step(checkpoints)
        5
    """
    return checkpoints.latest_step()


def best_step(checkpoints: ocp.CheckpointManager) -> int | None:
    """Returns the complete step with the least `eval_loss`, or None if no step has one."""
    losses = {step: x for step, x in _eval_losses(checkpoints).items() if math.isfinite(x)}
    return min(losses, key=lambda step: losses[step]) if losses else None


def _eval_losses(checkpoints: ocp.CheckpointManager) -> dict[int, float]:
    """Returns the `eval_loss` of every complete step that has one."""
    metrics_by_step = {step: checkpoints.metrics(step) for step in checkpoints.all_steps()}
    return {step: _loss_of(metrics) for step, metrics in metrics_by_step.items() if metrics}


def best_loss_tracker(
    checkpoints: ocp.CheckpointManager | None, keep_best: int
) -> Callable[[float], bool]:
    """Returns a collective function: is an `eval_loss` among the `keep_best` best so far?"""
    if checkpoints is None or not keep_best:
        return lambda loss: False
    losses = [*_eval_losses(checkpoints).values()]

    def is_best(loss: float) -> bool:
        ahead = sum(other <= loss for other in losses)
        if not broadcast_from_first(int(math.isfinite(loss) and ahead < keep_best)):
            return False
        losses.append(loss)
        return True

    return is_best


def save_checkpoint(
    checkpoints: ocp.CheckpointManager,
    step: int,
    state: PyTree[jax.Array | np.ndarray],
    metadata: Mapping[str, Any],
    *,
    eval_loss: float | None = None,
) -> None:
    """Saves a step. An existing checkpoint of the step is left as it is.

    A newer checkpoint is an error: two runs share a folder. The arrays of `state` may be donated to
    the next step at once. `eval_loss` is None if the step was not evaluated.
    """
    newest = latest_step(checkpoints)
    if newest is not None and newest > step:
        raise ValueError(
            f"`step` is {step} and {checkpoints.directory} has a checkpoint of step {newest}. "
            "Resume from that one, or choose another `run_name`."
        )
    if newest == step:
        return
    with failed_saves_as_run_errors(checkpoints):
        checkpoints.wait_until_finished()  # as orbax does, before another one goes to `.removed`
        if is_first_process():
            empty_removed(Path(checkpoints.directory))
        checkpoints.save(
            step,
            force=True,  # else nothing is saved, nor said, while an asynchronous save goes on
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), metadata=ocp.args.JsonSave(dict(metadata))
            ),
            metrics={} if eval_loss is None else {"eval_loss": eval_loss},
        )


@contextmanager
def closing_checkpoints(checkpoints: ocp.CheckpointManager) -> Iterator[ocp.CheckpointManager]:
    """Waits at the end of the context until all saves have finished."""
    try:
        yield checkpoints
    finally:
        with failed_saves_as_run_errors(checkpoints):
            checkpoints.close()
            if is_first_process():
                empty_removed(Path(checkpoints.directory))


@contextmanager
def failed_saves_as_run_errors(checkpoints: ocp.CheckpointManager) -> Iterator[None]:
    """Raises the errors of saves that fail inside this context as RunError."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:  # orbax passes on what the storage below it raises
        steps = ", ".join(step.name for step in steps_in(Path(checkpoints.directory))) or "none"
        raise RunError(
            f"A checkpoint could not be written to {checkpoints.directory}: {error}\nComplete "
            f"ones are as they were: {steps}. Remove the cause, and start again to go on."
        ) from error


def read_metadata(checkpoints: ocp.CheckpointManager, step: int) -> dict[str, Any]:
    """Returns the `metadata` that was saved with a step."""
    restored = checkpoints.restore(step, args=ocp.args.Composite(metadata=ocp.args.JsonRestore()))
    return restored["metadata"]


def restore_checkpoint(
    checkpoints: ocp.CheckpointManager, step: int, abstract_state: PyTree[jax.ShapeDtypeStruct]
) -> PyTree[jax.Array]:
    """Restores a step with any shardings; compares names, shapes and dtypes before it reads."""
    saved = saved_leaf_specs(checkpoints, step)
    check_same_leaves(saved, leaf_specs(abstract_state), f"{checkpoints.directory} step {step}")
    try:
        restored = checkpoints.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state))
        )
    except (OSError, ValueError) as error:  # tensorstore's are ValueErrors
        raise RunError(
            f"{checkpoints.directory} step {step} could not be read: {error}\nNothing has been "
            "changed. Remove the cause, and start again."
        ) from error
    return restored["state"]


def restore_weights(
    checkpoints: ocp.CheckpointManager, step: int, abstract_weights: PyTree[jax.ShapeDtypeStruct]
) -> PyTree[jax.Array]:
    """Restores the weights of a step alone, with the given shardings and dtypes."""
    tree = {"weights": abstract_weights}
    how = ocp.checkpoint_utils.construct_restore_args(tree)
    return _restore_part(checkpoints, step, tree, how)["weights"]


def restore_leaf(checkpoints: ocp.CheckpointManager, step: int, path: str) -> np.ndarray:
    """Restores one leaf of a step to host memory by its path, such as `weights/head/norm`."""
    names = path.split("/")
    tree: Any = 0
    how: Any = ocp.RestoreArgs(restore_type=np.ndarray)
    for name in reversed(names):
        tree, how = {name: tree}, {name: how}
    restored = _restore_part(checkpoints, step, tree, how)
    for name in names:
        restored = restored[name]
    return restored


def saved_leaf_specs(checkpoints: ocp.CheckpointManager, step: int, branch: str = "") -> LeafSpecs:
    """Returns the leaf specs of a saved step, or of a branch of its state. Reads no array."""
    tree = checkpoints.item_metadata(step)["state"].tree
    return leaf_specs(tree[branch] if branch else tree)


def _restore_part(
    checkpoints: ocp.CheckpointManager, step: int, tree: PyTree, how: PyTree
) -> PyTree:
    """Restores some leaves of a state, each by its restore arguments."""
    folder = checkpoints.directory / str(step) / "state"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        args = ocp.args.PyTreeRestore(tree, restore_args=how, partial_restore=True)
        return checkpointer.restore(folder, args=args)


def _quarantine_incomplete(folder: Path) -> None:
    """Renames incomplete steps: Orbax would resume from any folder that is named as a number."""
    for step in steps_in(folder):
        if not is_complete(step):
            quarantine(step, "incomplete")


def leaf_specs(tree: PyTree) -> LeafSpecs:
    """Returns the leaf specs of a tree; equal for a state and Orbax's metadata of it."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            tuple(leaf.shape),
            str(jax.numpy.dtype(leaf.dtype)),
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def check_same_leaves(
    saved: LeafSpecs,
    model: LeafSpecs,
    where: str,
    advice: str = "Use the config it was saved with, or another `run_name`.",
) -> None:
    """Raises ValueError with the leaves that differ, between `where` and `advice`."""
    lines = [f"{name}: only in the checkpoint" for name in saved if name not in model]
    lines += [f"{name}: only in the model" for name in model if name not in saved]
    lines += [
        f"{name}: {_describe(saved[name])} in the checkpoint, {_describe(leaf)} in the model"
        for name, leaf in model.items()
        if name in saved and saved[name] != leaf
    ]
    if not lines:
        return
    listed = lines[:MAX_LISTED]
    if len(lines) > MAX_LISTED:
        listed.append(f"and {len(lines) - MAX_LISTED} more")
    raise ValueError(
        f"{where} is of another model: {len(lines)} of {len({*saved, *model})} leaves differ.\n  "
        + "\n  ".join(listed)
        + f"\n{advice}"
    )


def _describe(leaf: tuple[tuple[int, ...], str]) -> str:
    shape, dtype = leaf
    return f"{dtype}[{', '.join(map(str, shape))}]"


# Orbax (0.11.20 to 0.12.8) computes how long it still waits for a write from `time.time()`. If the
# clock of the machine is set meanwhile, a save of a moment has "timed out after 0.00 seconds". It
# cannot be tried again: threads of the first attempt still write, and other processes wait for it.
_MODULES = (
    "orbax.checkpoint._src.checkpointers.async_checkpointer",
    "orbax.checkpoint._src.futures.future",
    "orbax.checkpoint._src.futures.signaling_client",
)
"""Modules of Orbax that compute deadlines by `time.time`."""

_OFFSET = time.time() - time.monotonic()
"""Seconds to the wall clock of this moment: Orbax also subtracts times that others have taken."""


class _SteadyTime(ModuleType):
    """The module `time`, whose `time` only goes forward, one second a second."""

    def __init__(self) -> None:
        super().__init__("time")
        vars(self).update(vars(time))
        self.time = lambda: _OFFSET + time.monotonic()


def _use_steady_clock() -> None:
    """Gives the modules of Orbax that compute deadlines a clock that cannot jump."""
    steady = _SteadyTime()
    for name in _MODULES:
        if isinstance(module := sys.modules.get(name), ModuleType) and "time" in vars(module):
            vars(module)["time"] = steady
