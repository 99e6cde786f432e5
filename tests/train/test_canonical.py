"""States in forward order and back: what is where, bit for bit, and what the devices hold."""

import gc
import itertools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.mpmd import MpmdArray
from jaxpipe.train.checkpoint import canonical_round_trip, canonical_shapes, state_from_canonical
from jaxpipe.train.plan import Setup
from jaxpipe.train.step import TrainState, init_state, stored_shardings

from .runs import DEEPSEEK, NONE, Settings, flat, setup_of

pytestmark = pytest.mark.ci

EIGHT: Settings = {"base_num_decoder_layers": 8, "vocab_size": 512}
RANKS: Settings = {"ici_pipeline_parallelism": 4}
SCHEDULED: Settings = RANKS | {"pipeline_engine": "scheduled"}
MPMD: Settings = RANKS | {"pipeline_engine": "mpmd"}
ZERO: Settings = {
    "shard_mode": "explicit",
    "ici_data_parallelism": 2,
    "shard_optimizer_over_data": True,
}
UNEVEN: Settings = {"pipeline_schedule": "1f1b", "pipeline_layout": "Et|t*3|t|tL"}
# Devices, and what differs.
SETUPS: dict[str, tuple[int, Settings]] = {
    "none": (2, EIGHT | NONE | {"ici_fsdp_parallelism": 2}),
    "one stage a rank": (8, EIGHT | RANKS | {"ici_fsdp_parallelism": 2}),
    "circular": (8, EIGHT | RANKS | ZERO | {"num_pipeline_repeats": 2}),
    "one stage a rank, a rule onto the stages": (
        4,
        EIGHT | RANKS | {"logical_axis_rules": [["embed", ["fsdp", "stage"]]]},
    ),
    "three repeats": (4, RANKS | {"base_num_decoder_layers": 12}),
    "V": (4, EIGHT | SCHEDULED | {"pipeline_schedule": "zbv"}),
    "uneven": (
        4,
        EIGHT | SCHEDULED | {"pipeline_schedule": "1f1b", "pipeline_layout": "Et|t*4|tt|tL"},
    ),
    "layers after": (
        4,
        DEEPSEEK | RANKS | {"base_num_decoder_layers": 7, "pipeline_parallel_layers": 4},
    ),
    "mpmd": (8, EIGHT | MPMD | {"ici_fsdp_parallelism": 2, "pipeline_schedule": "1f1b"}),
    "mpmd, interleaved": (4, EIGHT | MPMD | {"pipeline_schedule": "interleaved_1f1b"}),
    "mpmd, uneven": (4, EIGHT | MPMD | {"pipeline_layout": "Et|t*4|tt|tL"}),
}


SLOW = ("one stage a rank", "three repeats", "layers after", "mpmd", "mpmd, interleaved")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SETUPS],
)
def setup(request: pytest.FixtureRequest) -> Setup:
    devices, settings = SETUPS[request.param]
    return setup_of(devices, settings)


def test_layers_come_in_forward_order_and_go_back_bit_for_bit(setup: Setup):
    state = init_state(setup.step)
    before, where = jax.device_get(state), places(state)
    take, put_back = canonical_round_trip(setup.state, stored_shardings(setup.step))
    lent = take(state)
    for found, true in zip(stacks(lent), in_forward_order(setup, before), strict=True):
        np.testing.assert_array_equal(found, true)
    again = put_back(state, lent)
    assert all(leaf.is_deleted() for tree in (state, lent) for leaf in stacks(tree))
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(again))
    assert places(again) == where


def test_a_run_goes_on_from_what_another_saved(setup: Setup):
    state = init_state(setup.step)
    before, saved = jax.device_get(state), flat(setup, state)
    where = jax.tree.map(lambda leaf: leaf.sharding, canonical_shapes(setup.state))
    again = state_from_canonical(
        setup.state, stored_shardings(setup.step), jax.device_put(saved, where)
    )
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(again))
    assert places(again) == places(state)


def test_no_device_holds_a_second_state_on_the_way(setup: Setup, monkeypatch: pytest.MonkeyPatch):
    others = held(setup)
    state = init_state(setup.step)
    before, saved = held(setup) - others, flat(setup, state)
    array = type(jnp.zeros(()))
    found, delete, calls = [], array.delete, itertools.count()

    def watched(x: jax.Array) -> None:
        if next(calls) % 9 == 0:  # which takes a while
            found.append(held(setup) - others)
        delete(x)

    monkeypatch.setattr(array, "delete", watched)
    take, put_back = canonical_round_trip(setup.state, stored_shardings(setup.step))
    lent = take(state)
    after, largest = held(setup) - others, of_largest(setup, lent)
    of_stacks = of_largest(setup, stacks(lent))
    put_back(state, lent)
    assert next(calls) >= 2 * len(stacks(lent))
    if not setup.step.engine.storage.per_stage:
        assert np.all(found <= before + of_stacks)
    else:  # parts are joined on their ranks first, and room is made for as many as any rank has
        padded = setup.state.weights.slot_layer_ids.size / setup.pipeline.layout.num_layers
        assert np.all(found <= np.maximum(before, after) + 3 * padded * of_stacks)

    del state, lent
    of_state = before
    found.clear()
    others = held(setup)
    where = jax.tree.map(lambda leaf: leaf.sharding, canonical_shapes(setup.state))
    restored = jax.block_until_ready(jax.tree.map(jnp.copy, jax.device_put(saved, where)))
    before = held(setup) - others
    state_from_canonical(setup.state, stored_shardings(setup.step), restored)
    assert len(found) > 3
    if (
        not setup.step.engine.storage.per_stage
    ):  # here too ranks may have room for more layers than there are
        padded = np.prod(setup.pipeline.layout.dims) / setup.pipeline.layout.num_layers
        assert np.all(found <= np.maximum(before, of_state) + padded * largest)


def test_ranks_divide_what_layers_do_not():
    setup = setup_of(4, RANKS, {"base_num_decoder_layers": 12})  # 3 repeats
    odd = setup_of(4, SCHEDULED, UNEVEN, {"base_num_decoder_layers": 6})
    for leaf in [
        *stacks(canonical_shapes(setup.state)),
        *stacks(canonical_shapes(odd.state)),
    ]:
        assert leaf.sharding.shard_shape(leaf.shape)[0] == leaf.shape[0]
        assert 4 * np.prod(leaf.sharding.shard_shape(leaf.shape)) == leaf.size


def stacks(tree: TrainState) -> list[Any]:
    """The leaves with layers of the pipeline, of the weights and of Adam's moments."""
    return jax.tree.leaves([w["stages"] for w in weights_and_moments(tree)])


def weights_and_moments(state: TrainState) -> tuple[Any, Any, Any]:
    adam = next(part for part in state["optimizer"] if hasattr(part, "mu"))
    return state["weights"], adam.mu, adam.nu


def in_forward_order(setup: Setup, state: TrainState) -> list[np.ndarray]:
    """`stacks` of a state in host memory, one layer after the other."""
    if not setup.step.engine.storage.per_stage:
        numbers = np.array(setup.pipeline.layout.layer_ids)
        order = [np.flatnonzero(numbers == i)[0] for i in range(setup.pipeline.layout.num_layers)]
        return [leaf.reshape(-1, *leaf.shape[3:])[order] for leaf in stacks(state)]
    found = []
    for w in weights_and_moments(state):
        leaves = zip(*map(jax.tree.leaves, w["stages"]), strict=True)
        found += [np.concatenate(of_stages) for of_stages in leaves]
    return found


def places(state: TrainState) -> list[Any]:
    """How every leaf lies."""
    return [
        (x.mpmd_sharding.mpmd_idxs, x.spec) if isinstance(x, MpmdArray) else x.sharding
        for x in jax.tree.leaves(state)
    ]


def held(setup: Setup) -> np.ndarray:
    """Bytes on every device, of buffers that several arrays may share."""
    gc.collect()
    return by_device(setup, jax.live_arrays())


def of_largest(setup: Setup, tree: Any) -> np.ndarray:
    """Bytes on every device of that leaf of which it has most."""
    return np.max([by_device(setup, [leaf]) for leaf in jax.tree.leaves(tree)], axis=0)


def by_device(setup: Setup, arrays: Iterable[jax.Array]) -> np.ndarray:
    buffers = {
        (shard.device, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
        for array in arrays
        for shard in array.addressable_shards
    }
    devices = list(setup.mesh.devices.flat)
    found = np.zeros(len(devices))
    for (device, _), size in buffers.items():
        found[devices.index(device)] += size
    return found
