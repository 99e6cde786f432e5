import itertools
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxpipe.train.checkpoint import (
    latest_step,
    open_checkpoints,
    read_metadata,
    restore_checkpoint,
    save_checkpoint,
)


def sharding(num_stages: int, num_fsdp: int) -> NamedSharding:
    mesh = jax.make_mesh(
        (num_stages, num_fsdp), ("stage", "fsdp"), axis_types=(AxisType.Auto, AxisType.Auto)
    )
    return NamedSharding(mesh, PartitionSpec("stage", "fsdp"))


def state(where: NamedSharding, *, width: int = 8, dtype: Any = jnp.float32) -> dict[str, Any]:
    """What a trainer saves: weights, the state of AdamW, a count."""
    kernel = jnp.arange(8.0 * width).reshape(8, width).astype(dtype)
    weights = {"stages": {"kernel": jax.device_put(kernel, where)}, "head": jnp.ones((3,))}
    return {"weights": weights, "optimizer": optax.adamw(1e-3).init(weights), "step": jnp.int32(4)}


def abstract(tree: Any, where: NamedSharding) -> Any:
    replicated = NamedSharding(where.mesh, PartitionSpec())
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=where if x.ndim == 2 else replicated
        ),
        tree,
    )


def save(folder: Path, *steps: int, **options: Any) -> None:
    with open_checkpoints(folder, max_to_keep=2, asynchronous=True) as checkpoints:
        for step in steps:
            save_checkpoint(checkpoints, step, state(sharding(4, 2), **options), {"step": step})


def refusal(folder: Path, wanted: Any) -> str:
    with (
        open_checkpoints(folder, max_to_keep=2, asynchronous=False) as checkpoints,
        pytest.raises(ValueError) as error,
    ):
        restore_checkpoint(checkpoints, 1, wanted)
    return str(error.value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with step 1. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    save(folder, 1)
    return folder


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (8, 1), (1, 1)])
def test_a_state_loads_into_any_sharding(saved: Path, sizes: tuple[int, int]):
    where = sharding(*sizes)
    with open_checkpoints(saved, max_to_keep=2, asynchronous=False) as checkpoints:
        restored = restore_checkpoint(checkpoints, 1, abstract(state(where), where))
    expected = state(where)
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, restored, expected)
    assert restored["weights"]["stages"]["kernel"].sharding == where


def test_an_empty_folder_has_no_latest_step(tmp_path: Path):
    with open_checkpoints(tmp_path / "a" / "b", max_to_keep=1, asynchronous=True) as checkpoints:
        assert latest_step(checkpoints) is None


def test_the_newest_steps_stay(tmp_path: Path):
    save(tmp_path, 1, 5, 9)
    with open_checkpoints(tmp_path, max_to_keep=2, asynchronous=False) as checkpoints:
        assert latest_step(checkpoints) == 9
        assert checkpoints.all_steps() == [5, 9]
        assert read_metadata(checkpoints, 5) == {"step": 5}


def test_a_state_may_be_donated_as_soon_as_save_returns(tmp_path: Path):
    where = sharding(4, 2)
    with open_checkpoints(tmp_path, max_to_keep=1, asynchronous=True) as checkpoints:
        given = state(where, width=256)
        save_checkpoint(checkpoints, 1, given, {})
        jax.tree.map(lambda x: x.delete(), given)
        checkpoints.wait_until_finished()
        expected = state(where, width=256)
        restored = restore_checkpoint(checkpoints, 1, abstract(expected, where))
        jax.tree.map(np.testing.assert_array_equal, restored, expected)


@pytest.mark.parametrize("hours", [[0, 10, 0], [1, 2, 3]], ids=["there and back", "forward"])
def test_saves_survive_a_clock_that_is_set(tmp_path: Path, monkeypatch, hours: list[int]):
    now, ahead = time.time, itertools.cycle(hours)
    with open_checkpoints(tmp_path, max_to_keep=None, asynchronous=True) as checkpoints:
        monkeypatch.setattr(time, "time", lambda: now() + 3600 * next(ahead))
        for step in (1, 2):
            save_checkpoint(checkpoints, step, {"w": jnp.ones(9)}, {})
        checkpoints.wait_until_finished()
        assert list(checkpoints.all_steps()) == [1, 2]


def test_a_step_saved_twice_stays_as_it_was(saved: Path, tmp_path: Path):
    folder = shutil.copytree(saved, tmp_path / "copy")
    with open_checkpoints(folder, max_to_keep=2, asynchronous=False) as checkpoints:
        save_checkpoint(checkpoints, 1, {"other": jnp.ones(2)}, {"other": True})
        assert read_metadata(checkpoints, 1) == {"step": 1}


def test_a_step_behind_the_newest_is_refused(saved: Path):
    with (
        open_checkpoints(saved, max_to_keep=2, asynchronous=False) as checkpoints,
        pytest.raises(ValueError, match=r"`step` is 0 and .* has a checkpoint of step 1\. Resume"),
    ):
        save_checkpoint(checkpoints, 0, {"a": jnp.ones(2)}, {})


def test_what_a_killed_run_left_is_ignored_and_its_step_can_be_saved(saved: Path, tmp_path: Path):
    folder = shutil.copytree(saved, tmp_path / "copy")
    # Killed while orbax wrote step 2; and a copy that broke off in step 3.
    unfinished = folder / "2.orbax-checkpoint-tmp"
    shutil.copytree(folder / "1" / "state", unfinished / "state")
    shutil.copytree(folder / "1" / "state", folder / "3" / "state")
    where = sharding(4, 2)
    with open_checkpoints(folder, max_to_keep=3, asynchronous=False) as checkpoints:
        assert latest_step(checkpoints) == 1
        for step in (2, 3):
            save_checkpoint(checkpoints, step, state(where), {"step": step})
            assert latest_step(checkpoints) == step
        restore_checkpoint(checkpoints, 3, abstract(state(where), where))
    assert (folder / "3.incomplete").exists()


def test_another_width_names_the_leaves_with_both_shapes(saved: Path):
    where = sharding(4, 2)
    message = refusal(saved, abstract(state(where, width=16), where))
    assert f"{saved} step 1 is of another model: 3 of 8 leaves differ." in message
    assert (
        "weights/stages/kernel: float32[8, 8] in the checkpoint, float32[8, 16] in the model"
    ) in message


def test_another_dtype_is_not_converted(saved: Path):
    where = sharding(4, 2)
    message = refusal(saved, abstract(state(where, dtype=jnp.bfloat16), where))
    assert "kernel: float32[8, 8] in the checkpoint, bfloat16[8, 8] in the model" in message


def test_other_names_are_listed_up_to_a_few(saved: Path):
    where = sharding(1, 1)
    wanted = abstract({f"leaf_{i}": jnp.ones((2, 2)) for i in range(4)}, where)
    message = refusal(saved, wanted)
    assert "12 of 12 leaves differ" in message
    assert "optimizer/0/count: only in the checkpoint" in message
    assert "and 4 more" in message
    message = refusal(saved, abstract(state(where) | {"extra": jnp.ones(1)}, where))
    assert "extra: only in the model" in message


def test_a_step_is_saved_also_while_the_one_before_is_being_saved(tmp_path: Path, monkeypatch):
    with open_checkpoints(tmp_path, max_to_keep=None, asynchronous=True) as checkpoints:
        monkeypatch.setattr(type(checkpoints), "is_saving_in_progress", lambda self: True)
        for step in (1, 2, 3):
            save_checkpoint(checkpoints, step, {"x": jnp.ones(2)}, {})
        checkpoints.wait_until_finished()
        assert checkpoints.all_steps() == [1, 2, 3]
