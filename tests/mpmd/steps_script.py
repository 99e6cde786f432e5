"""What the processes of test_processes.py do. Arguments: CASE PROCESS NUM_PROCESSES PORT."""

import atexit
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpipe as jp
from jaxpipe import mpmd
from jaxpipe.mpmd import jaxpp

TIMEOUT = 5.0


def rows(process: int, num_processes: int, names: str) -> None:
    """Rows of the harness, each process checking what it has."""
    # These make arrays, which must not be before `jax.distributed` is there.
    from harness.contract import check_mpmd_result, make_case, mpmd_result, schedule_of
    from mpmd.process_rows import ROWS

    for row in ROWS[names]():
        result = mpmd_result(row, make_case(row), schedule_of(row), timeout=60.0)
        print(f"{row}: {check_mpmd_result(row, result)} leaves are right", flush=True)


def groups() -> mpmd.MpmdMesh:
    return mpmd.MpmdMesh(Mesh(in_order(), ("stage",)), "stage")


def in_order() -> np.ndarray:
    """All devices, process by process."""
    return np.array(sorted(jax.devices(), key=lambda device: (device.process_index, device.id)))


def training(schedule: jaxpp.NamedSchedule):
    """A step of an MLP with a layer in each stage."""

    def loss(weights, x):
        for weight in weights:
            x = mpmd.mark_stage_end(jnp.tanh(x @ weight))
        return jnp.sum(x**2)

    def step(weights, xs):
        value, grads = mpmd.treduce(
            lambda x: jax.value_and_grad(loss)(weights, x),
            xs,
            schedule=schedule,
            operation=mpmd.Add,
        )
        return jax.tree.map(lambda w, g: w - 1e-2 * g, weights, grads), value

    return step


def make_step(schedule: jaxpp.NamedSchedule):
    """A compiled step of an MLP, its weights and its batch."""
    rng = np.random.default_rng(0)
    weights = [np.asarray(rng.normal(size=(8, 8)), np.float32) for _ in range(schedule.num_stages)]
    xs = np.asarray(rng.normal(size=(8, 2, 8)), np.float32)

    step = training(schedule)
    compiled = mpmd.mpmd_jit_with_loop(step, groups(), timeout=TIMEOUT).compile(weights, xs)
    return compiled, weights, xs


def numbers(result) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(result) if leaf.is_partially_addressable]


def delays(process: int, num_processes: int, steps: str) -> None:
    """Steps with pauses before actions at random give what a step without gives, every time."""
    # It runs last: what was registered before the session is opened runs after its own.
    atexit.register(lambda: print("at exit:", [thread.name for thread in threading.enumerate()]))
    compiled, weights, xs = make_step(jaxpp.ZeroBubble(num_processes))
    expected = numbers(compiled(weights, xs))
    rng = random.Random(process)

    def disturbed(instruction, act):
        def run(slots):
            if rng.random() < 0.1:
                time.sleep(rng.random() / 50)
            act(slots)

        return run

    slow = compiled.with_thunks(disturbed)
    for _ in range(int(steps)):
        for got, true in zip(numbers(slow(weights, xs)), expected, strict=True):
            np.testing.assert_array_equal(got, true)
    print(f"{steps} steps are equal", flush=True)


def forever(process: int, num_processes: int, folder: str) -> None:
    """Steps until somebody kills a process. A file of its name says that a process has begun."""
    compiled, weights, xs = make_step(jaxpp.Std1F1B(num_processes))
    for step in range(10**9):
        weights, value = compiled(weights, xs)
        value.block_until_ready()
        if step == 3:
            (Path(folder) / str(process)).touch()


def differ(process: int, num_processes: int, _: str) -> None:
    """Process 1 has another program."""
    make_step(jaxpp.Std1F1B(num_processes) if process else jaxpp.GPipe(num_processes))


def meshes(process: int, num_processes: int, _: str) -> None:
    """Process 1 divides a group's arrays along another axis."""
    shape = (num_processes, 1, 2) if process == 1 else (num_processes, 2, 1)
    mesh = Mesh(in_order().reshape(shape), ("stage", "fsdp", "tensor"))

    def loss(weights, x):
        for weight in weights:
            x = jax.lax.with_sharding_constraint(jnp.tanh(x @ weight), P("fsdp"))
            x = mpmd.mark_stage_end(x)
        return jnp.sum(x**2)

    def step(weights, xs):
        return mpmd.treduce(
            lambda x: jax.value_and_grad(loss)(weights, x), xs, jaxpp.GPipe(num_processes)
        )

    weights = [np.eye(8, dtype=np.float32)] * num_processes
    compiled = mpmd.mpmd_jit_with_loop(step, mpmd.MpmdMesh(mesh, "stage"), timeout=TIMEOUT)
    compiled.compile(weights, np.ones((2, 2, 8), np.float32))


def apart(process: int, num_processes: int, _: str) -> None:
    """Weights that are made, trained, brought over all devices and back where they belong."""
    mesh = mpmd.MpmdMesh(Mesh(in_order().reshape(num_processes, -1), ("stage", "fsdp")), "stage")

    def first_weights(key):
        keys = jax.random.split(key, num_processes)
        return [jax.random.normal(k, (8, 8)) / 3 for k in keys]

    step = training(jaxpp.Std1F1B(num_processes))
    key, xs = jax.random.key(0), np.ones((4, 2, 8), np.float32)
    specs = [P("fsdp")] * num_processes
    jitted = mpmd.mpmd_jit_with_loop(
        step, mesh, in_specs=(specs, None), out_specs=(specs, None), timeout=4 * TIMEOUT
    )
    compiled = jitted.compile(jax.eval_shape(first_weights, key), xs)
    where = compiled.in_shardings[0][0]
    weights = mpmd.mpmd_jit_with_loop(
        first_weights, mesh, out_shardings=where, timeout=4 * TIMEOUT
    )(key)
    assert [leaf.is_partially_addressable for leaf in weights] == [
        s == process for s in range(num_processes)
    ]
    with jax.default_device(jax.local_devices()[0]):
        true = jax.jit(first_weights)(key)
        over_all = [NamedSharding(mesh.jax_mesh, P(("stage", "fsdp")))] * num_processes
        for _step in range(2):
            weights, value = compiled(weights, xs)
            true, true_value = jax.jit(step)(true, xs)
            mine, sharding = np.asarray(weights[process]), weights[process].sharding
            spmd = mpmd.mpmd_to_spmd_reshard(mesh, weights, over_all)
            for x, y in zip(spmd, true, strict=True):
                assert x.sharding == over_all[0]
                for shard in x.addressable_shards:
                    np.testing.assert_allclose(shard.data, y[shard.index], rtol=1e-5, atol=1e-6)
            again = mpmd.spmd_to_mpmd_reshard(mesh, spmd, where)
            np.testing.assert_array_equal(again[process], mine)
            assert again[process].sharding == sharding
            assert all(x.is_deleted() for x in (*weights, *spmd))
            weights = again
    if value.is_partially_addressable:
        np.testing.assert_allclose(value, true_value, rtol=1e-5)
    print("every shard is right", flush=True)


def prints(process: int, num_processes: int, _: str) -> None:
    """Two steps, each of which prints a sum in every stage and behind the loop."""

    def loss(weights, x):
        for stage, weight in enumerate(weights):
            x = jnp.tanh(x @ weight)
            jax.debug.print("stage {} of {:.3f}", stage, jnp.sum(x))
            x = mpmd.mark_stage_end(x)
        return jnp.sum(x**2)

    def step(weights, xs):
        grad = jax.value_and_grad(loss)
        value, grads = mpmd.treduce(
            lambda x: grad(weights, x), xs, jaxpp.Std1F1B(num_processes), operation=mpmd.Add
        )
        jax.debug.print("loss {:.3f}", value)
        return value, grads

    weights = [np.eye(4, dtype=np.float32)] * num_processes
    xs = np.ones((3, 2, 4), np.float32) * np.arange(1, 4, dtype=np.float32)[:, None, None]
    compiled = mpmd.mpmd_jit_with_loop(step, groups(), timeout=4 * TIMEOUT).compile(weights, xs)
    for _step in range(2):
        jax.block_until_ready(compiled(weights, xs))
    jax.effects_barrier()


def optimizer(process: int, num_processes: int, _: str) -> None:
    """The front door with an optimizer whose state is made before the first step."""
    width, microbatches, rows = 8, 4, 8
    mesh = Mesh(in_order(), ("stage",))
    layers = [
        {"w": jax.random.normal(key, (width, width)) / 3, "b": jnp.zeros(width)}
        for key in jax.random.split(jax.random.key(0), 2 * num_processes)
    ]
    params = {
        "embed": jnp.eye(width),
        "layers": layers,
        "head": {"w": jnp.ones((width, width)), "scale": jnp.float32(1.3)},
        "shared": jnp.full(width, 0.5),
    }
    batch = {
        name: jax.random.normal(jax.random.key(seed), (microbatches * rows, width))
        for seed, name in enumerate("xy")
    }

    def layer(w, x, batch):
        return x + w["shared"] * jnp.tanh(x @ w["layer"]["w"] + w["layer"]["b"])

    def loss(w, x, batch):
        return jnp.mean((w["scale"] * (x @ w["w"]) - batch["y"]) ** 2)

    def plain(params, batch):
        x = batch["x"] @ params["embed"]
        for w in params["layers"]:
            x = layer({"layer": w, "shared": params["shared"]}, x, batch)
        return loss(params["head"], x, batch)

    model = jp.Model(lambda w, batch: batch["x"] @ w, layer, loss, shared=True)
    pipe = jp.pipeline(model, schedule="1f1b", engine="mpmd", mesh=mesh, microbatches=microbatches)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))

    def train(tx, value_and_grad):
        def step(params, state, batch):
            value, grads = value_and_grad(params, batch)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value, optax.global_norm(grads)

        return step

    with pytest.raises(ValueError, match="ranks belong to several processes"):
        pipe.check(params, batch)
    tx_of_stages, stored = pipe.optimizer(tx), pipe.shard(params)
    step = pipe.jit(train(tx_of_stages, pipe.value_and_grad))
    by_hand = jax.jit(train(tx, jax.value_and_grad(plain)))
    norm = pipe.jit(optax.global_norm)
    state, state_by_hand = tx_of_stages.init(stored), tx.init(params)
    moments = [x.mpmd_idxs for x in jax.tree.leaves(state) if x.dtype == jnp.float32]
    groups = [stored[name] for name in ("embed", "head", "shared", "layers")]  # as in the state
    assert moments == 2 * [x.mpmd_idxs for x in jax.tree.leaves(groups)], moments
    for _step in range(3):
        true_norm = optax.global_norm(params)
        of_all = norm(stored)
        params, state_by_hand, *true = by_hand(params, state_by_hand, batch)
        stored, state, (value, _), grad_norm = step(stored, state, batch)
        got = zip((of_all, value, grad_norm), (true_norm, *true), strict=True)
        for x, expected in got:
            if x.is_partially_addressable:
                np.testing.assert_allclose(np.asarray(x), expected, rtol=1e-5)
    print("optimizer is right", flush=True)


def raises(process: int, num_processes: int, _: str) -> None:
    """Process 1 has an exception between two steps, when process 0 waits for what it sends."""
    compiled, weights, xs = make_step(jaxpp.Std1F1B(num_processes))
    for count in range(10**9):
        weights, value = compiled(weights, xs)
        value.block_until_ready()
        if process == 1 and count == 3:
            raise RuntimeError("no more data")


def stuck(process: int, num_processes: int, _: str) -> None:
    """Process 1 stops in the middle of a step."""
    compiled, weights, xs = make_step(jaxpp.Std1F1B(num_processes))

    def freeze(instruction, act):
        def run(slots):
            if process == 1 and "fwd_1__2" in getattr(instruction, "name", ""):
                os.kill(os.getpid(), signal.SIGSTOP)
            act(slots)

        return run

    compiled(weights, xs)[1].block_until_ready()
    jax.block_until_ready(compiled.with_thunks(freeze)(weights, xs))


CASES = rows, delays, forever, differ, meshes, apart, prints, optimizer, raises, stuck

if __name__ == "__main__":
    case, *counts = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    process, num_processes, port = map(int, counts)
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, process)
    name, _, argument = case.partition(":")
    {f.__name__: f for f in CASES}[name](process, num_processes, argument)
    jax.distributed.shutdown()
