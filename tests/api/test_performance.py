"""Options for speed and memory change no number, and each has an effect on the program."""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jaxpipe as jp
from jaxpipe import devices, xla
from jaxpipe._compat import jaxprs_in_params
from jaxpipe.autodiff.backward import check_offload
from jaxpipe.engines import EngineOptions

B, D, L = 16, 8, 8
NAMES = ("embed", "layers", "head")


def layer(w: Any, x: Any, batch: Any) -> Any:
    hidden = checkpoint_name(jnp.tanh(x @ w["up"]), "mlpwi_0")
    return x + hidden @ w["down"]


MODEL = jp.Model(
    embed=lambda w, batch: batch["x"] @ w,
    layer=layer,
    loss=lambda w, x, batch: jp.Weighted(
        jnp.sum(batch["mask"] * jnp.sum((x @ w - batch["y"]) ** 2, -1)), jnp.sum(batch["mask"])
    ),
)


def params() -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 2 + 2 * L))

    def matrix(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / shape[0] ** 0.5 / 2

    return {
        "embed": matrix(D, D),
        "layers": [{"up": matrix(D, 2 * D), "down": matrix(2 * D, D)} for _ in range(L)],
        "head": matrix(D, 4),
    }


def batch() -> Any:
    keys = jax.random.split(jax.random.key(1), 3)
    return {
        "x": jax.random.normal(keys[0], (B, D)),
        "y": jax.random.normal(keys[1], (B, 4)),
        "mask": jax.random.bernoulli(keys[2], 0.6, (B,)).astype(jnp.float32),
    }


def pipeline(sizes: dict[str, int], model: Any = MODEL, **options: Any) -> Any:
    mesh = jp.make_mesh(sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    return jp.pipeline(model, mesh=mesh, **{"microbatches": 4, "schedule": "1f1b"} | options)


def text(pipe: Any) -> str:
    """The program of loss and gradients."""
    of_tokens = pipe.model.vocab_parallel_loss is not None
    given, rows = (vocabulary(), tokens()) if of_tokens else (params(), batch())
    with jax.set_mesh(pipe.mesh):
        return jax.jit(pipe.value_and_grad).lower(pipe.shard(given), rows).as_text()


FSDP, DATA = {"stage": 2, "fsdp": 2}, {"stage": 2, "data": 2, "fsdp": 2}
ROWS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    f"{gather}, {schedule}": (FSDP, {"gather": gather, "schedule": schedule})
    for gather in ("tick", "once", "repeat", "layer")
    for schedule in ("1f1b", "circular", "looped_bfs")
} | {
    "layer, uneven": (FSDP, {"gather": "layer", "layers_per_stage": (3, 5)}),
    "layer, uneven, circular": (
        FSDP,
        {"gather": "layer", "layers_per_stage": (3, 5), "schedule": "circular"},
    ),
    "layer, zero bubble": (FSDP, {"gather": "layer", "schedule": "zero_bubble_h1"}),
    "layer, ZeRO-1": (DATA, {"gather": "layer", "zero1": True}),
    "once, ZeRO-1, circular": (DATA, {"gather": "once", "zero1": True, "schedule": "circular"}),
    "ZeRO-1 over data alone": ({"stage": 2, "data": 2}, {"zero1": True}),
    "ZeRO-1, no pipeline": (
        {"stage": 1, "data": 2, "fsdp": 2},
        {"zero1": True, "schedule": None},
    ),
    "forwarding delay": ({"stage": 2}, {"forwarding_delay": True, "schedule": "circular"}),
    "accumulate": ({"stage": 2}, {"accumulate": 2}),
    "accumulate, circular, ZeRO-1": (
        DATA,
        {"accumulate": 2, "schedule": "circular", "microbatches": 2, "zero1": True},
    ),
    "accumulate, mpmd": ({"stage": 2}, {"accumulate": 2, "engine": "mpmd"}),
    "accumulate, no pipeline": ({"stage": 1}, {"accumulate": 2, "schedule": None}),
    "two layers, no pipeline": (
        {"stage": 1, "data": 2, "fsdp": 2},
        {"scan_layers": 2, "schedule": None, "layer_remat": "full", "zero1": True},
    ),
    "two layers": (FSDP, {"scan_layers": 2, "gather": "layer"}),
    "two layers, zero bubble": (FSDP, {"scan_layers": 2, "schedule": "zero_bubble_h1"}),
    "two layers, circular": (
        FSDP,
        {"scan_layers": 2, "schedule": "circular", "gather": "layer", "layer_remat": "minimal"},
    ),
    "two layers, uneven": (FSDP, {"scan_layers": 2, "layers_per_stage": (2, 6)}),
    "four layers, mpmd": ({"stage": 2}, {"scan_layers": 4, "engine": "mpmd"}),
    "remat by name": ({"stage": 2}, {"remat": "minimal"}),
    "remat of layers": (FSDP, {"remat": "none", "layer_remat": "full", "gather": "layer"}),
    "remat of layers, mpmd": ({"stage": 2}, {"layer_remat": "full", "engine": "mpmd"}),
    "offload": (FSDP, {"remat": "minimal_offloaded"}),
    "offload, layers, zero bubble": (
        FSDP,
        {"remat": "none", "layer_remat": "minimal_offloaded", "schedule": "zero_bubble_h1"},
    ),
    "offload, chunks": (
        {"stage": 4},
        {"remat": "minimal_offloaded", "schedule": "interleaved_1f1b", "chunks": 2},
    ),
    "offload, uneven": (FSDP, {"remat": "minimal_offloaded", "layers_per_stage": (3, 5)}),
    "offload, circular": (FSDP, {"remat": "minimal_offloaded", "schedule": "circular"}),
    "offload, no pipeline": ({"stage": 1}, {"remat": "minimal_offloaded", "schedule": None}),
    "remat, no pipeline": ({"stage": 1}, {"remat": "full", "schedule": None}),
    "remat of layers, no pipeline": ({"stage": 1}, {"layer_remat": "full", "schedule": None}),
}


SLOW = (
    *("once, looped_bfs", "repeat, looped_bfs", "tick, looped_bfs", "layer, looped_bfs"),
    *("layer, uneven", "layer, uneven, circular", "accumulate, circular, ZeRO-1"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in ROWS]
)
def test_numbers_are_those_of_the_plain_program(name: str):
    sizes, options = ROWS[name]
    pipe = pipeline(sizes, **options)
    pipe.check(params(), batch(), optimizer=optax.adam(1e-3, eps=1e-4), steps=3)


def shapes_on_host(jaxpr: Any) -> list[tuple[int, ...]]:
    """The shapes of what loops carry in the host's memory."""
    found: list[tuple[int, ...]] = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            avals = [x.aval for x in equation.outvars]
            found += [a.shape for a in avals if a.memory_space == jax.memory.Space.Host]
        for inner in jaxprs_in_params(equation.params):
            found += shapes_on_host(getattr(inner, "jaxpr", inner))
    return found


@pytest.mark.parametrize(
    ("schedule", "slots"), [("1f1b", 4), ("zero_bubble_h1", 4), ("interleaved_1f1b", 6)]
)
def test_schedules_keep_what_is_offloaded_in_slots_on_the_host(schedule: str, slots: int):
    chunks = 2 if schedule == "interleaved_1f1b" else 1
    options = {"chunks": chunks} if chunks > 1 else {}
    pipe = pipeline(FSDP, schedule=schedule, remat="minimal_offloaded", **options)
    with jax.set_mesh(pipe.mesh):
        traced = jax.make_jaxpr(pipe.value_and_grad)(pipe.shard(params()), batch())
    of_layers = (L // 2 // chunks, B // 4 // 2, 2 * D)  # layers of a stage, rows, channels
    assert set(shapes_on_host(traced.jaxpr)) == {(slots, *of_layers)}


def test_halves_keep_what_is_offloaded_in_two_buffers():
    options = {"schedule": "looped_bfs", "chunks": L, "gather": "repeat"}
    pipe = pipeline({"stage": 1, "fsdp": 2}, remat="minimal_offloaded", **options)
    with jax.set_mesh(pipe.mesh):
        traced = jax.make_jaxpr(pipe.value_and_grad)(pipe.shard(params()), batch())
    slots = 4 * L // 2 + 1  # and one that is never read
    assert set(shapes_on_host(traced.jaxpr)) == {(slots, B // 4 // 2, 2 * D)}


def test_devices_that_do_not_say_their_memories_may_be_offloaded_to():
    class Gpu:
        platform = "gpu"

        def addressable_memories(self) -> list[Any]:
            return []

    check_offload("minimal_offloaded", None, [Gpu()])


V, T = 12, 3


def cross_entropy(x: Any, weights: Any, targets: Any, axis: str) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ weights), targets[..., None], -1)[..., 0]


def language_model(is_weighted: bool, *, tied: bool) -> Any:
    """The same loss twice: of whole logits, and of those that ranks divide."""

    def loss(cross_entropy: Any, head: Any, x: Any, batch: Any, axis: str = "") -> Any:
        weights = head["embed"]["table"].T if tied else head
        losses = cross_entropy(x, weights, batch["y"], axis)
        metrics = {"largest": jnp.mean(jnp.square(losses))}
        if not is_weighted:
            return jnp.mean(losses), metrics
        return jp.Weighted(jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])), metrics

    return jp.Model(
        embed=lambda w, batch: w["table"][batch["x"]],
        layer=layer,
        loss=partial(loss, cross_entropy),
        vocab_parallel_loss=partial(loss, jp.vocab_parallel_cross_entropy),
        tied=tied,
    )


def vocabulary() -> Any:
    table = jax.random.normal(jax.random.key(2), (V, D))
    return params() | {
        "embed": {"table": table},
        "head": jax.random.normal(jax.random.key(3), (D, V)),
    }


def tokens() -> Any:
    keys = jax.random.split(jax.random.key(5), 3)
    x, y = (jax.random.randint(key, (B, T), 0, V) for key in keys[:2])
    return {"x": x, "y": y, "mask": jax.random.bernoulli(keys[2], 0.5, (B, T)).astype(jnp.float32)}


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (FSDP, {"gather": "layer"}),
        ({"stage": 4}, {"schedule": "zero_bubble_h1"}),
        (DATA, {"schedule": "interleaved_1f1b", "zero1": True}),
        ({"stage": 2}, {"schedule": "zbv", "accumulate": 2, "microbatches": 2}),
        (FSDP, {"schedule": "circular", "gather": "repeat"}),
        ({"stage": 4}, {"schedule": "circular", "microbatches": 8}),
        (
            DATA,
            {
                "schedule": "circular",
                "chunks": 2,
                "gather": "layer",
                "zero1": True,
                "forwarding_delay": True,
                "remat": "minimal_offloaded",
            },
        ),
    ],
)
def test_ranks_that_share_the_vocabulary_have_the_loss_of_whole_logits(
    sizes: dict[str, int], options: dict[str, Any], tied: bool, is_weighted: bool
):
    pipe = pipeline(sizes, language_model(is_weighted, tied=tied), vocab_parallel=True, **options)
    pipe.check(vocabulary(), tokens())


def test_a_vocabulary_that_does_not_divide_and_other_numbers_are_refused():
    given = params() | {"embed": {"table": jnp.ones((V, D))}, "head": jnp.ones((D, V - 1))}
    pipe = pipeline(FSDP, language_model(False, tied=False), vocab_parallel=True)
    with pytest.raises(ValueError, match="11 columns, which the 2 ranks of 'stage' do not divide"):
        pipe.check(given, tokens())
    given["head"] = jnp.ones((D, V))
    model = language_model(False, tied=False)
    own = dataclasses.replace(model, vocab_parallel_loss=lambda w, x, batch, axis: jnp.mean(x))
    with pytest.raises(ValueError, match="returns a scalar, and `loss` a scalar and the metrics"):
        pipeline(FSDP, own, vocab_parallel=True).check(given, tokens())


def layer_of_shared(w: Any, x: Any, batch: Any) -> Any:
    own, shared = w["layer"], w["shared"]["up"]
    return x + jnp.tanh(x @ own["up"] + x @ shared) @ own["down"]


OTHERS = {
    "kinds": (
        jp.Model(MODEL.embed, {"first": layer, "last": lambda w, x, batch: x + x @ w}, MODEL.loss),
        lambda given: (
            given | {"layers": {"first": given["layers"][:4], "last": [jnp.eye(D) / 9] * 4}}
        ),
    ),
    "shared": (
        jp.Model(MODEL.embed, layer_of_shared, MODEL.loss, shared=True),
        lambda given: given | {"shared": {"up": given["layers"][0]["up"] / 2}},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (FSDP, {"gather": "layer", "schedule": "circular"}),
        pytest.param(FSDP, {"gather": "layer", "layers_per_stage": (3, 5)}, marks=pytest.mark.slow),
        pytest.param(
            DATA,
            {"gather": "layer", "zero1": True, "accumulate": 2, "microbatches": 2},
            marks=pytest.mark.slow,
        ),
        ({"stage": 1, "data": 2, "fsdp": 2}, {"zero1": True, "schedule": None}),
        ({"stage": 2}, {"accumulate": 2, "engine": "mpmd"}),
    ],
)
def test_layers_of_kinds_and_layers_that_share_have_them_too(
    name: str, sizes: dict[str, int], options: dict[str, Any]
):
    model, change = OTHERS[name]
    pipe = pipeline(sizes, model, **options)
    pipe.check(change(params()), batch(), optimizer=optax.adam(1e-3, eps=1e-4), steps=3)


def test_zero1_divides_gradients_and_the_state_of_an_optimizer_over_data():
    pipe = pipeline(DATA, zero1=True)
    stored, tx = pipe.shard(params()), pipe.optimizer(optax.adam(1e-3))
    state = tx.init(stored)

    @pipe.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        _, grads = pipe.value_and_grad(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    def num_shards(x: jax.Array) -> int:
        return x.size // x.addressable_shards[0].data.size

    before = jax.tree.map(num_shards, jax.tree.leaves(stored))
    for _ in range(2):
        stored, state, grads = step(stored, state, batch())
        assert jax.tree.map(num_shards, jax.tree.leaves(stored)) == before
        assert [2 * n for n in before] == jax.tree.map(num_shards, jax.tree.leaves(grads))
        moments = [x for x in jax.tree.leaves(state) if x.ndim]
        assert [2 * n for n in before] * 2 == jax.tree.map(num_shards, moments)


@pytest.mark.parametrize("schedule", ["circular", "1f1b", None])
@pytest.mark.parametrize("options", [{}, {"gather": "once", "zero1": True}], ids=str)
def test_what_is_lowered_from_shapes_is_what_runs(schedule: Any, options: dict[str, Any]):
    sizes = DATA | {"stage": 2 if schedule else 1}
    options = options if schedule else {name: options[name] for name in options if name == "zero1"}
    pipe = pipeline(sizes, schedule=schedule, **options)
    stored, tx = pipe.shard(params()), pipe.optimizer(optax.adam(1e-3))

    def step(params: Any, state: Any, batch: Any) -> Any:
        _, grads = pipe.value_and_grad(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    where = jax.tree.map(lambda x: x.sharding, stored)
    for shapes in (pipe.shapes(params()), pipe.shapes(stored)):
        assert jax.tree.map(lambda x: x.sharding, shapes) == where
        assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(
            lambda x: (x.shape, x.dtype), stored
        )
    shapes = pipe.shapes(params())
    lowered = pipe.jit(step).lower(shapes, tx.init(shapes), batch())
    assert lowered.as_text() == pipe.jit(step).lower(stored, tx.init(stored), batch()).as_text()


ALONE = {"stage": 1}
EFFECTS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "gather": lambda: (pipeline(FSDP, gather="tick"), pipeline(FSDP)),
    "once": lambda: (pipeline(FSDP), pipeline(FSDP, gather="once")),
    "zero1": lambda: (pipeline(DATA), pipeline(DATA, zero1=True)),
    "remat": lambda: (pipeline({"stage": 2}), pipeline({"stage": 2}, remat="minimal")),
    "remat without a pipeline": lambda: (
        pipeline(ALONE, schedule=None),
        pipeline(ALONE, schedule=None, remat="full"),
    ),
    "layer_remat": lambda: (
        pipeline({"stage": 2}, remat="none"),
        pipeline({"stage": 2}, remat="none", layer_remat="full"),
    ),
    "scan_layers": lambda: (pipeline({"stage": 2}), pipeline({"stage": 2}, scan_layers=2)),
    "reduce_dtype": lambda: (pipeline(DATA), pipeline(DATA, reduce_dtype="bfloat16")),
    "vocab_parallel": lambda: (
        pipeline(FSDP, language_model(False, tied=False)),
        pipeline(FSDP, language_model(False, tied=False), vocab_parallel=True),
    ),
    **{
        name: lambda name=name, value=value: (
            pipeline({"stage": 2}, schedule="circular", chunks=2),
            pipeline({"stage": 2}, schedule="circular", chunks=2, **{name: value}),
        )
        for name, value in (
            ("forwarding_delay", True),
            ("scan_repeats", False),
            ("scan_ticks", False),
        )
    },
}


def test_every_option_of_an_engine_has_a_row():
    assert {*EngineOptions._fields} <= {*EFFECTS}


@pytest.mark.parametrize("name", EFFECTS)
def test_every_option_changes_the_program(name: str):
    without, with_option = EFFECTS[name]()
    assert text(without) != text(with_option)


def test_layers_gather_one_at_a_time():
    """One gather of two matrices in the loop over layers, and none of a stage."""
    whole, by_layer = (text(pipeline(FSDP, gather=gather)) for gather in ("tick", "layer"))
    assert f"tensor<4x{D}x{2 * D}xf32>" in whole  # a stage of 4 layers, gathered
    assert f"tensor<4x{D}x{2 * D}xf32>" not in by_layer
    assert f"tensor<4x{D}x{D}xf32>" in by_layer  # as it is stored


@pytest.mark.parametrize(
    "options",
    [
        {"gather": "layer"},
        {"schedule": "circular"},
        {"schedule": None},
        {"engine": "mpmd"},
        {"gather": "layer", "frozen": lambda path, leaf: "up" in path},
    ],
    ids=["by layer", "circular", "no pipeline", "mpmd", "frozen"],
)
def test_parameters_are_cast_before_they_are_gathered(options: dict[str, Any]):
    def layer(w: Any, x: Any, batch: Any) -> Any:
        assert {leaf.dtype for leaf in jax.tree.leaves(w)} == {jnp.dtype(jnp.bfloat16)}
        y = jnp.tanh(x.astype(jnp.bfloat16) @ w["up"]) @ w["down"]
        return x + y.astype(jnp.float32)

    def loss(w: Any, x: Any, batch: Any) -> Any:
        return jnp.mean((x @ w.astype(jnp.float32) - batch["y"]) ** 2)

    model = jp.Model(lambda w, batch: batch["x"] @ w.astype(jnp.float32), layer, loss)
    pipe = pipeline(FSDP, model, compute_dtype=jnp.bfloat16, **options)

    def plain(params: Any, batch: Any) -> Any:
        low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        x = model.embed(low["embed"], batch, None)
        for w in low["layers"]:
            x = layer(w, x, batch)
        return loss(low["head"], x, batch)

    pipe.check(params(), batch(), plain=plain)
    value = pipe.jit(pipe.value_and_grad)
    _, grads = value(pipe.shard(params()), batch())
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
    if options.get("engine") != "mpmd" and options.get("schedule", "") is not None:
        gathers = [line for line in text(pipe).splitlines() if "all_gather" in line]
        assert gathers and all("bf16" in line for line in gathers)


def rounded(x: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), x)


def added(trees: Any) -> Any:
    return jax.tree.map(lambda *leaves: sum(leaves), *trees)


@pytest.mark.parametrize(
    ("gather", "schedule"), [("tick", "1f1b"), ("tick", "circular"), ("repeat", "1f1b")]
)
def test_gradients_that_are_stored_whole_are_summed_over_devices_once(gather: str, schedule: str):
    def scaled(w: Any, x: Any, batch: Any) -> Any:
        return layer(w, x * w["scale"], batch)

    def spec(path: str, leaf: Any) -> P | None:
        return P() if "scale" in path else None

    scale = jnp.linspace(0.5, 1.5, D)
    own = params() | {"layers": [w | {"scale": scale} for w in params()["layers"]]}
    model = dataclasses.replace(MODEL, layer=scaled)
    pipe = pipeline(DATA, model, gather=gather, schedule=schedule, param_specs=spec)
    pipe.check(own, batch())
    step = pipe.jit(pipe.value_and_grad).lower(pipe.shard(own), batch()).compile()
    sums = [site for site in xla.audit(step.as_text()).sites if site.kind == "all-reduce"]
    # Matrices, which `fsdp` divides, may be summed over `data` in loops.
    assert not [site for site in sums if site.loops and re.search(r"\[\d+,8\]", site.shape)]


def test_without_a_pipeline_shards_of_gradients_are_summed_over_data():
    """XLA would sum whole gradients over `data` and `fsdp` at once: f times what `data` sends."""
    pipe = pipeline({"data": 2, "fsdp": 4}, schedule=None, microbatches=1)
    stored = pipe.shard(params())
    step = pipe.jit(pipe.value_and_grad).lower(stored, batch()).compile()
    sums = [site for site in xla.audit(step.as_text()).sites if site.kind == "all-reduce"]
    shards = [leaf.addressable_shards[0].data.shape[-2:] for leaf in jax.tree.leaves(stored)]
    for rows, columns in shards:  # XLA may have transposed it
        assert any(
            f"[{rows},{columns}]" in s.shape or f"[{columns},{rows}]" in s.shape for s in sums
        )


@pytest.mark.parametrize("scan_layers", [None, 4])
def test_without_a_pipeline_gradients_of_layers_are_added_to_their_sums_in_place(scan_layers: Any):
    """Otherwise a step needs room for the gradients of all layers twice."""
    wide = 256
    weights = {"up": jnp.ones((wide, 4 * wide)), "down": jnp.ones((4 * wide, wide))}
    own = {"embed": jnp.eye(wide), "layers": [weights] * L, "head": jnp.ones((wide, 4))}
    rows = batch() | {"x": jnp.ones((B, wide))}

    def temporary(microbatches: int) -> int:
        options = {"microbatches": microbatches, "layer_remat": "full", "scan_layers": scan_layers}
        pipe = pipeline({"stage": 1}, schedule=None, **options)
        step = pipe.jit(pipe.value_and_grad).lower(pipe.shapes(own), rows).compile()
        return step.memory_analysis().temp_size_in_bytes

    of_layers = sum(leaf.nbytes for leaf in jax.tree.leaves(own["layers"]))
    assert temporary(4) - temporary(1) < of_layers / 2


@pytest.mark.parametrize("options", [{"schedule": "circular"}, {"engine": "mpmd"}])
def test_stages_of_one_layer_have_no_iterations_of_two(options: dict[str, Any]):
    pipe = pipeline(
        {"stage": 2}, **{"schedule": "interleaved_1f1b"} | options, chunks=L // 2, scan_layers=2
    )
    with pytest.raises(ValueError, match="a loop of a stage has 1"):
        pipe.check(params(), batch())


@pytest.fixture
def torus(monkeypatch):
    """Devices of which four or more in a line of the mesh lie along three dims of a v5p."""
    module, engine = "jaxpipe.spmd.weight_gather._gather", "jaxpipe.engines._unpipelined"
    for where in (module, engine):
        monkeypatch.setattr(f"{where}.find_hardware", lambda kind: devices.HARDWARE["v5p"])
    monkeypatch.setattr(f"{module}._num_torus_dims", lambda mesh, axis: 3)
    monkeypatch.setattr(f"{module}._IN_TWO_STEPS", {"v5p": 4})


def groups_of_gathers(sizes: dict[str, int], **options: Any) -> list[str]:
    """Returns the devices of each gather of a step without a pipeline that is exact."""
    pipe = pipeline(sizes, schedule=None, microbatches=2, **options)
    pipe.check(params(), batch())
    step = pipe.jit(pipe.value_and_grad).lower(pipe.shard(params()), batch()).compile()
    return re.findall(r"all-gather\([^\n]*replica_groups=(\S+)", step.as_text())


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"fsdp": 4, "data": 2}], ids=str)
def test_without_a_pipeline_three_dims_of_a_torus_are_gathered_along_lines_and_then_planes(
    sizes: dict[str, int], torus
):
    groups = groups_of_gathers(sizes)
    along_lines = [group for group in groups if group.startswith("[4,2]")]
    assert len(groups) == 2 * len(along_lines) > 0, groups


def test_gathers_in_two_steps_run_beside_the_work_of_several_layers(torus, monkeypatch):
    """Unless `scan_layers` says how many, or they take too much of a device's memory."""
    one, two, four = (len(groups_of_gathers({"fsdp": 8}, scan_layers=n)) for n in (1, 2, 4))
    assert one < two < four
    assert len(groups_of_gathers({"fsdp": 8})) == four
    assert len(groups_of_gathers({"fsdp": 8}, scan_layers=True)) == four
    monkeypatch.setattr("jaxpipe.engines._unpipelined._SHARE_IN_FLIGHT", 1e-9)
    assert len(groups_of_gathers({"fsdp": 8})) == one


@pytest.mark.parametrize("schedule", ["1f1b", "circular"])
@pytest.mark.parametrize("gather", ["tick", "once", "repeat", "layer"])
def test_gradients_are_summed_over_devices_in_the_dtype_of_reductions(gather: str, schedule: str):
    """Against gradients of the plain program on the rows of each device, rounded and added here."""
    model = dataclasses.replace(
        MODEL, loss=lambda w, x, batch: jnp.mean(jnp.sum((x @ w - batch["y"]) ** 2, -1))
    )
    pipe = pipeline(FSDP, model, gather=gather, schedule=schedule, reduce_dtype="bfloat16")
    loss, grads = pipe.jit(pipe.value_and_grad)(pipe.shard(params()), batch())
    grads = jax.device_get(pipe.unshard(grads))

    def plain(params: Any, rows: Any) -> Any:
        x = rows["x"] @ params["embed"]
        for w in params["layers"]:
            x = layer(w, x, rows)
        return jnp.mean(jnp.sum((x @ params["head"] - rows["y"]) ** 2, -1))

    def of_rows(microbatch: int, device: int) -> Any:
        start = 4 * microbatch + 2 * device
        rows = jax.tree.map(lambda x: x[start : start + 2], batch())
        return jax.tree.map(lambda g: g / 8, jax.grad(plain)(params(), rows))

    each = [[of_rows(m, d) for d in range(2)] for m in range(4)]
    sums = [added(devices) for devices in zip(*each, strict=True)]  # of a device
    exact = added(sums)
    once = rounded(added([rounded(x) for x in sums]))
    in_ticks = added([rounded(added(map(rounded, devices))) for devices in each])
    of_layers = in_ticks if gather in ("tick", "layer") else once
    np.testing.assert_allclose(loss[0], plain(params(), batch()), rtol=1e-6)
    pipe.check(params(), batch())  # by the rounding of bfloat16
    for name in ("embed", "head"):
        np.testing.assert_allclose(grads[name], exact[name], rtol=1e-5, atol=1e-6)
    trees = (tree["layers"] for tree in (grads, of_layers, exact))
    for a, b, c in zip(*map(jax.tree.leaves, trees), strict=True):
        largest = np.abs(b).max()
        # A sum in another order may round to the neighbour in bfloat16.
        assert np.abs(a - b).max() <= 2**-7 * largest
        assert np.mean(np.abs(a - b) <= 1e-6 * largest) > 0.95
        assert np.mean(np.abs(a - c) <= 1e-6 * largest) < 0.5


def test_calls_have_dropout_masks_of_their_own():
    """Keys are those of docs/explanation/exactness.md."""
    fold_in = jax.random.fold_in

    def dropped(x: Any, key: Any) -> Any:
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)

    model = jp.Model(
        lambda w, batch, key: dropped(batch["x"] @ w, key),
        lambda w, x, batch, key: x + dropped(layer(w, x, batch), key),
        lambda w, x, batch, key: jnp.mean((dropped(x, key) @ w - batch["y"]) ** 2),
    )

    def plain(params: Any, batch: Any, key: Any, calls: int, microbatches: int) -> Any:
        losses = []
        for i in range(calls * microbatches):
            rows = B // (calls * microbatches)
            part = jax.tree.map(lambda x: x[i * rows : (i + 1) * rows], batch)  # noqa: B023
            of_piece = fold_in(fold_in(key, 0), i)
            x = model.embed(params["embed"], part, fold_in(of_piece, 0))
            for j, w in enumerate(params["layers"]):
                of_call = fold_in(fold_in(key, j + 1), i // microbatches)
                mask_key = fold_in(fold_in(of_call, i % microbatches), 0)
                x = x + dropped(layer(w, x, part), mask_key)
            losses.append(model.loss(params["head"], x, part, fold_in(of_piece, 1)))
        return jnp.mean(jnp.stack(losses))

    key = jax.random.key(3)
    rows: list[tuple[int, dict[str, Any]]]
    rows = [(4, {}), (4, {"engine": "mpmd"}), (2, {"schedule": "circular"})]
    for microbatches, options in rows:
        pipe = pipeline({"stage": 2}, model, accumulate=2, microbatches=microbatches, **options)
        expected = plain(params(), batch(), key, 2, microbatches)
        loss, _ = pipe.jit(pipe.value)(pipe.shard(params()), batch(), key)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)


REFUSED = {
    "gather of mpmd": ({"engine": "mpmd", "gather": "layer"}, "`gather` is 'layer', .*'mpmd'"),
    "gather without a pipeline": ({"schedule": None, "gather": "once"}, "'unpipelined'"),
    "an unknown gather": ({"gather": "never"}, "`gather` is 'never'. Give one of 'tick'"),
    "delay of 1f1b": ({"forwarding_delay": True}, "`forwarding_delay` is True.*engine='circular'"),
    "no vocabulary": ({"vocab_parallel": True}, "the model has no `vocab_parallel_loss`"),
    "ranks of mpmd": (
        {"engine": "mpmd", "vocab_parallel": True},
        "engine='circular' or 'scheduled'",
    ),
    "ZeRO-1 of mpmd": ({"engine": "mpmd", "zero1": True}, "`zero1` is True"),
    "too few microbatches for a delay": (
        {"forwarding_delay": True, "schedule": "circular", "microbatches": 2, "chunks": 2},
        "Make `microbatches` at least 4, or `forwarding_delay` False",
    ),
    "sums without a pipeline": (
        {"schedule": None, "reduce_dtype": "bfloat16"},
        "`reduce_dtype` is 'bfloat16', .*'unpipelined'",
    ),
    "sums of mpmd": ({"engine": "mpmd", "reduce_dtype": jnp.bfloat16}, "'mpmd' has no such option"),
    "sums of integers": ({"reduce_dtype": "int8"}, "`reduce_dtype` is int8"),
    "sums in no dtype": ({"reduce_dtype": "half-ish"}, "`reduce_dtype` is 'half-ish'"),
    "sums in 8 bits": ({"reduce_dtype": jnp.float8_e4m3fn}, "Give 'float32' or 'bfloat16'"),
    "sums that XLA places": (
        {"reduce_dtype": "bfloat16", "row_wise": {"layer": False}, "schedule": "circular"},
        "`reduce_dtype` is bfloat16, and whole microbatches, as layer",
    ),
    "an unknown policy": ({"remat": "fulll"}, "`remat` is 'fulll'. Give one of full"),
    "no calls": ({"accumulate": 0}, "`accumulate`"),
    "no layers": ({"scan_layers": -1}, "`scan_layers` is -1. Give at least 1"),
    "too many layers": (
        {"scan_layers": 8},
        "is 8, the layers of an iteration, and a loop of a stage has 4",
    ),
    "layers that do not divide": (
        {"scan_layers": 2, "layers_per_stage": (5, 3), "engine": "mpmd"},
        "is 2, .* has 5",
    ),
    "windows of split backwards": (
        {"schedule": "zero_bubble_h1", "gather": "repeat"},
        "'repeat'",
    ),
}


@pytest.mark.parametrize(
    ("options", "axis"), [({"gather": "layer"}, "fsdp"), ({"zero1": True}, "data")]
)
def test_an_option_of_an_axis_that_the_mesh_lacks_is_refused(options: dict[str, Any], axis: str):
    mesh = jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2])
    (name,) = options
    with pytest.raises(ValueError, match=f"`{name}` is .* no axis '{axis}': its axes are 'stage'"):
        jp.pipeline(MODEL, schedule="1f1b", mesh=mesh, microbatches=4, **options)


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_engine_has_not_is_refused_by_name(name: str):
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        pipeline(FSDP, **options).check(params(), batch())
