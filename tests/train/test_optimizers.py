"""Optimizers of a run: every step is that of a plain program with optax, in every engine.

The judge is a llama written out below, whose layers are a list, with the optimizer that a user of
optax writes for such a tree.
"""

import io
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from jaxpipe.data import synthetic_batches
from jaxpipe.hugging_face import to_hugging_face
from jaxpipe.models.weights import weight_shapes
from jaxpipe.train import Config, train
from jaxpipe.train.checkpoint import first_state
from jaxpipe.train.estimate import state_bytes
from jaxpipe.train.optim import factories
from jaxpipe.train.plan import Setup, make_optimizer, user_tree
from jaxpipe.train.step import init_state, make_train_step, shard_batch
from small_models import small_llama

from .converted import make_run
from .runs import (
    DEEPSEEK,
    MIXTURE,
    NONE,
    ROWS,
    TINY,
    Settings,
    config_of,
    flat,
    setup_of,
    three_steps,
)

STEPS, LENGTH, CLIP = 3, 16, 0.5
EPSILON, TIMESCALE = 1e-5, 10_000.0


def norm(x: Any, scale: Any) -> Any:
    return scale * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + EPSILON)


def turned(x: Any) -> Any:
    """Rotates the halves of the channels [b, T, H, C] by their positions."""
    half = x.shape[-1] // 2
    angles = jnp.outer(jnp.arange(x.shape[1]), TIMESCALE ** -(jnp.arange(half) / half))
    cos, sin = (f(angles)[:, None] for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(w: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("btd,dhc->bthc", x, w[name]) for name in ("query", "key", "value"))
    q, k = turned(q), turned(k)
    scores = jnp.einsum("bqhc,bkhc->bhqk", q, k) / jnp.sqrt(q.shape[-1])
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    shares = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhc,hcd->bqd", shares, v, w["out"])


def plain_loss(params: Any, batch: Any) -> Any:
    table = params["embed"]["table"]
    x = table[batch["tokens"]]
    for w in params["layers"]:
        x = x + attention(w["attention"], norm(x, w["attention_norm"]))
        h, mlp = norm(x, w["mlp_norm"]), w["mlp"]
        x = x + (jax.nn.silu(h @ mlp["gate"]) * (h @ mlp["up"])) @ mlp["down"]
    logits = jax.nn.log_softmax(norm(x, params["head"]["norm"]) @ table.T)
    picked = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)
    return -jnp.mean(picked)


def linear(step: Any) -> Any:
    """The linear schedule of `SETTINGS`, without warmup: from 0.01 to 0.001 after 3 steps."""
    return 1e-2 * (1 - 0.9 * step / STEPS)


rate: Any = linear  # some factories are annotated as if they took no schedule


SETTINGS: Settings = TINY | {
    "learning_rate_schedule": "linear",
    "warmup_steps_fraction": 0.0,
    "gradient_clipping_threshold": CLIP,
}


def is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda w: w.ndim >= 2, params)


def as_matrix(path: Any, w: Any) -> Any:
    """Heads and their channels are one side of a matrix."""
    if w.ndim != 3:
        return w
    return w.reshape(-1, w.shape[-1]) if path[-1].key == "out" else w.reshape(len(w), -1)


def muon_by_hand(weight_decay: float, **adam: Any) -> Any:
    """Muon of 2D matrices of layers, in which heads are joined, and AdamW for the others."""

    def labels(params: Any) -> Any:
        layers = jax.tree.map(lambda w: "muon" if w.ndim == 2 else "adamw", params["layers"])
        others = {name: jax.tree.map(lambda _: "adamw", params[name]) for name in ("embed", "head")}
        return others | {"layers": layers}

    inner = optax.partition(
        {
            "muon": contrib.muon(rate, weight_decay=weight_decay),
            "adamw": optax.adamw(rate, **adam, weight_decay=weight_decay, mask=is_matrix),
        },
        labels,
    )

    def flat(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(as_matrix, tree)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, state = inner.update(flat(updates), state, flat(params))
        return jax.tree.map(lambda u, w: u.reshape(w.shape), updates, params), state

    return optax.GradientTransformation(lambda params: inner.init(flat(params)), update)


# Adam divides the rounding of gradients that are almost zero by `eps`.
ADAM: dict[str, Any] = {"b1": 0.9, "b2": 0.95, "eps": 1e-3}
DECAY: Settings = {"adam_weight_decay": 0.5}
WITH_EPS: Settings = DECAY | {"adam_eps": 1e-3}
NO_DECAY: Settings = {"adam_weight_decay": 0.1}  # the default, which these do not read
OPTIMIZERS: dict[str, tuple[Callable[[], Any], Settings]] = {
    "adamw": (lambda: optax.adamw(rate, **ADAM, weight_decay=0.5, mask=is_matrix), WITH_EPS),
    "muon": (lambda: muon_by_hand(0.5, **ADAM), WITH_EPS),
    "adafactor": (
        lambda: optax.adafactor(rate, min_dim_size_to_factor=8),
        NO_DECAY | {"optimizer_arguments": {"min_dim_size_to_factor": 8}},
    ),
    "lion": (lambda: optax.lion(rate, weight_decay=0.5, mask=is_matrix), DECAY),
    "sgd": (
        lambda: optax.sgd(rate, momentum=0.9, nesterov=True),
        NO_DECAY | {"optimizer_arguments": {"momentum": 0.9, "nesterov": True}},
    ),
    "schedule_free_adamw": (
        lambda: contrib.schedule_free_adamw(rate, eps=1e-3, weight_decay=0.1),
        NO_DECAY | {"optimizer_arguments": {"eps": 1e-3, "weight_decay": 0.1}},
    ),
    # Their states have the first weights, which no update changes.
    "dog": (lambda: contrib.dog(rate), NO_DECAY),
    "prodigy": (
        lambda: contrib.prodigy(rate, eps=1e-3),
        NO_DECAY | {"optimizer_arguments": {"eps": 1e-3}},
    ),
}
"""What a user of optax writes, and the settings of a run."""

STAGES: Settings = {"ici_pipeline_parallelism": 2}
ENGINES: dict[str, tuple[int, Settings]] = {
    "none": (1, NONE),
    "none, fsdp": (2, NONE | {"ici_fsdp_parallelism": 2}),
    "circular": (2, STAGES),
    "circular, fsdp": (4, STAGES | {"ici_fsdp_parallelism": 2}),
    "circular, zero1": (4, STAGES | {"ici_data_parallelism": 2, "shard_optimizer_over_data": True}),
    "scheduled": (
        2,
        STAGES
        | {
            "pipeline_engine": "scheduled",
            "pipeline_schedule": "1f1b",
            "pipeline_layout": "Ettt|tL",
        },
    ),
    "mpmd": (2, STAGES | {"pipeline_engine": "mpmd", "pipeline_schedule": "1f1b"}),
    "explicit": (4, STAGES | {"ici_fsdp_parallelism": 2, "shard_mode": "explicit"}),
}


def test_adafactor_of_programs_of_ranks_is_refused():
    with pytest.raises(ValueError, match="not put together for checkpoints"):
        setup_of(2, STAGES | NO_DECAY | {"pipeline_engine": "mpmd", "optimizer": "adafactor"})


def user_params(setup: Setup, state: Any) -> Any:
    """The weights of a canonical state with a list of layers."""
    weights = state["weights"]
    count = setup.state.weights.layout.num_layers
    layers = [jax.tree.map(lambda w: jnp.asarray(w[i]), weights["stages"]) for i in range(count)]  # noqa: B023
    return {"embed": weights["embed"], "layers": layers, "head": weights["head"]}


def trained_plainly(tx: Any, params: Any) -> tuple[list[float], list[Any]]:
    """The losses of three steps, and the weights after each."""
    batch_at = synthetic_batches(vocab_size=64, batch_size=ROWS, length=LENGTH, seed=0)
    tx = optax.chain(optax.clip_by_global_norm(CLIP), tx)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(plain_loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return loss, optax.apply_updates(params, updates), state

    losses, weights = [], []
    with jax.numpy_dtype_promotion("standard"):  # optax wants it
        state = tx.init(params)
        for i in range(STEPS):
            loss, params, state = step(params, state, batch_at(i))
            losses.append(float(loss))
            weights.append(params)
    return losses, weights


def error(got: Any, wanted: Any) -> float:
    """The largest difference of a leaf, divided by its largest magnitude."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    return max(np.abs(np.asarray(a) - b).max() / np.abs(np.asarray(b)).max() for a, b in pairs)


SLOW = pytest.mark.slow
QUICK = {("muon", "circular, fsdp"), ("sgd", "mpmd"), ("dog", "explicit")}


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        pytest.param(name, engine, marks=() if (name, engine) in QUICK else SLOW)
        for name in OPTIMIZERS
        for engine in ENGINES
        if (name, engine) != ("adafactor", "mpmd")  # refused
    ],
)
def test_three_steps_are_those_of_a_plain_program_with_optax(name: str, engine: str):
    make, settings = OPTIMIZERS[name]
    devices, layout = ENGINES[engine]
    run = three_steps(devices, SETTINGS | layout | {"optimizer": name} | settings)
    losses, weights = trained_plainly(make(), user_params(run.setup, run.first))
    np.testing.assert_allclose([m["loss"] for m in run.metrics], losses, rtol=1e-5)
    assert error(user_params(run.setup, run.saved), weights[1]) <= 1e-5
    # The state goes on in another layout: the loss of the third step, after two steps here.
    assert np.isclose(run.go_on(run.saved), losses[2], rtol=1e-5)


def test_a_function_of_the_users_is_given_the_schedule_and_the_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "my_optimizers.py").write_text(
        "import optax\n"
        "def signs(learning_rate, weight_decay, mask, scale=1.0):\n"
        "    return optax.chain(optax.scale_by_sign(), optax.scale(scale),\n"
        "        optax.add_decayed_weights(weight_decay, mask),\n"
        "        optax.scale_by_learning_rate(learning_rate))\n"
        "def without_rate(scale=1.0):\n"
        "    return optax.scale(-scale)\n"
        "def plain(learning_rate, steps=()):\n"
        "    assert steps == () or [*map(type, steps)] == [int, str], steps\n"
        "    return optax.sgd(learning_rate)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = {"optimizer": "my_optimizers:signs", "optimizer_arguments": {"scale": 0.5}} | DECAY
    run = three_steps(1, SETTINGS | NONE | own)
    tx = optax.chain(
        optax.scale_by_sign(),
        optax.scale(0.5),
        optax.add_decayed_weights(0.5, is_matrix),
        optax.scale_by_learning_rate(rate),
    )
    losses, _ = trained_plainly(tx, user_params(run.setup, run.first))
    np.testing.assert_allclose([m["loss"] for m in run.metrics], losses, rtol=1e-5)
    for name, message in (
        ("my_optimizers:signs", r"has 'momentum', which my_optimizers:signs does not take\. It ta"),
        ("my_optimizers:without_rate", "has no argument `learning_rate`"),
        ("my_optimizers:missing", "cannot be imported: AttributeError"),
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError"),
    ):
        with pytest.raises(ValueError, match=message):
            setup_of(1, NONE, {"optimizer": name, "optimizer_arguments": {"momentum": 0.9}})
    plain: Settings = {"optimizer": "my_optimizers:plain"} | NO_DECAY
    for key, value in (
        ("adam_b1", 0.5),
        ("adam_weight_decay", 0.7),
        ("weight_decay_exclude", ["x"]),
    ):
        with pytest.raises(ValueError, match=f"`{key}` is .*, which it does not read"):
            setup_of(1, NONE, plain, {key: value})
    setup_of(1, NONE, plain, {"optimizer_arguments": {"steps": [100, "end"]}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "muno"}, r"'muno', which optax does not have\. Did you mean 'muon'\?"),
        ({"optimizer": "lbfgs"}, "'lbfgs', which cannot train a pipeline: its line search"),
        (
            {"optimizer": "sgd", "optimizer_arguments": {"beta": 0.9}},
            r"'beta', which sgd does not take\. It takes momentum, nesterov, accumulator_dtype\.",
        ),
        (
            {"optimizer_arguments": {"b1": 0.8}},
            "'b1', which the key `adam_b1` gives to adamw. Set `adam_b1`",
        ),
        (
            {"optimizer": "sgd", "optimizer_arguments": {"learning_rate": 0.1}},
            "'learning_rate', which the key `learning_rate` gives to sgd",
        ),
        (
            {"optimizer": "sgd", "adam_weight_decay": 0.5},
            r"`adam_weight_decay` is 0\.5, which it does not read\. Leave it at 0\.1",
        ),
        ({"optimizer": "lion", "adam_b2": 0.99}, r"`adam_b2` is 0\.99, which it does not read"),
        ({"optimizer": "muon", "optimizer_arguments": {"adam_b1": 0.8}}, "Set `adam_b1`"),
        (
            {"optimizer": "schedule_free_sgd", "eval_interval": 1, "eval_steps": 1},
            "to be evaluated at an average of them",
        ),
        ({"optimizer_arguments": [0.9]}, "Input should be a mapping"),
        (
            {"optimizer": "muon", "optimizer_arguments": {"adaptive": True}},
            "'adaptive', which muon cannot be given here: it would sum over all layers",
        ),
        (
            {"optimizer": "adafactor", "weight_decay_exclude": ["attention"]},
            r"`weight_decay_exclude` is \('attention',\), which it does not read",
        ),
        *(
            ({"optimizer": name}, f"'{name}', which cannot train a pipeline: it takes no schedule")
            for name in ("rprop", "sm3", "optimistic_adam")
        ),
        (
            {"optimizer": "polyak_sgd"},
            "'polyak_sgd', which cannot train a pipeline: it needs the l",
        ),
    ],
)
def test_what_an_optimizer_does_not_take_is_refused_by_name(settings: Settings, message: str):
    with pytest.raises(ValueError, match=message):
        Config(**settings)


@pytest.mark.slow
def test_muon_treats_every_expert_as_a_matrix_of_its_own_and_leaves_norms_of_heads_out():
    settings = SETTINGS | MIXTURE | NONE | WITH_EPS | {"optimizer": "muon", "base_emb_dim": 8}
    plan = setup_of(1, settings).state
    shapes, keys = weight_shapes(user_tree(plan)), iter(jax.random.split(jax.random.key(0), 99))
    params, grads = (
        jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), shapes) for _ in range(2)
    )
    tx, muon = make_optimizer(plan), contrib.muon(rate, weight_decay=0.5)
    adam: Any = optax.adamw(rate, **ADAM, weight_decay=0.0)

    def alone(tx: Any, grad: Any, weight: Any) -> Any:
        """The update of a matrix, or of a vector, by itself."""
        return tx.update({"w": grad}, tx.init({"w": weight}), {"w": weight})[0]["w"]

    with jax.numpy_dtype_promotion("standard"):
        updates: Any = tx.update(grads, tx.init(params), params)[0]
        trees = (tree["layers"] for tree in (updates, grads, params))
        layers: Any = jax.tree.map(lambda *leaves: [x[2] for x in leaves], *trees)
        for name in ("gate", "up", "down"):
            got, grad, weight = layers["moe"]["experts"][name]
            assert got.shape[0] == 8
            for e in range(8):
                assert error(got[e], alone(muon, grad[e], weight[e])) < 1e-5, name
        for name, rows in (("query", 1), ("key", 1), ("out", 2)):
            matrices = layers["attention"][name]
            got, *pair = (x.reshape(np.prod(x.shape[:rows]), -1) for x in matrices)
            assert error(got, alone(muon, *pair)) < 1e-5, name
        for got, *pair in (layers["attention"]["query_norm"], layers["attention"]["key_norm"]):
            assert error(got, alone(adam, *pair)) < 1e-5


def test_layers_outside_of_the_pipeline_are_refused_where_a_stack_is_one_array():
    with pytest.raises(ValueError, match=r"'adafactor'.*`embed\.layers` stack"):
        setup_of(1, NONE | DEEPSEEK | NO_DECAY | {"optimizer": "adafactor"})
    setup_of(1, NONE | DEEPSEEK | {"optimizer": "muon", "routed_bias": True})


def test_an_argument_that_the_factory_cannot_use_is_refused_when_a_run_is_set_up():
    arguments = {"optimizer": "muon", "optimizer_arguments": {"ns_coeffs": "no such preset"}}
    with pytest.raises(ValueError, match=r"cannot be built with .*Unknown ns_coeff preset"):
        setup_of(1, NONE | arguments)
    with pytest.raises(ValueError, match=r"'adamw' cannot be built with .*nonsense"):
        setup_of(1, NONE | {"optimizer_arguments": {"mu_dtype": "nonsense"}})
    arguments = {"optimizer": "schedule_free_adamw", "optimizer_arguments": {"warmup_steps": 5}}
    with pytest.raises(
        ValueError, match=r"'schedule_free_adamw' cannot be (built|run) with .*Type"
    ):
        setup_of(1, NONE | NO_DECAY | arguments)
    setup_of(1, NONE, NO_DECAY, {"optimizer": "nadamw", "adam_weight_decay": 0.5})
    decay: Settings = {"optimizer_arguments": {"weight_decay_rate": 0.1}}
    setup_of(1, NONE, NO_DECAY, decay, {"optimizer": "adafactor", "weight_decay_exclude": ["mlp"]})


@pytest.mark.parametrize(
    ("name", "field", "engine", "layers_after"),
    [
        ("schedule_free_adamw", "z", "circular, fsdp", 0),
        pytest.param("schedule_free_adamw", "z", "mpmd", 0, marks=SLOW),
        pytest.param("schedule_free_sgd", "z", "explicit", 0, marks=SLOW),
        pytest.param("prodigy", "params0", "scheduled", 0, marks=SLOW),
        pytest.param("schedule_free_sgd", "z", "none, fsdp", 2, marks=SLOW),
    ],
)
def test_a_state_that_has_the_weights_has_those_of_init_from(
    name: str, field: str, engine: str, layers_after: int, tmp_path: Path
):
    sizes = small_llama(base_num_decoder_layers=4, base_mlp_dim=24, vocab_size=64)
    weights = make_run(tmp_path / "run", sizes, layers_after=layers_after)
    if layers_after:
        after = weights["head"].pop("layers")
        weights["stages"] = jax.tree.map(lambda *x: np.concatenate(x), weights["stages"], after)
    devices, layout = ENGINES[engine]
    setup = setup_of(devices, vars(sizes), NO_DECAY, layout, {"optimizer": name})
    state = flat(setup, first_state(setup.step, str(tmp_path / "run")))
    jax.tree.map(np.testing.assert_array_equal, state["weights"], weights)
    # Both optimizers of optax begin with a copy of the weights.
    found = jax.tree.leaves(state["optimizer"], is_leaf=lambda x: hasattr(x, field))
    (has_field,) = [s for s in found if hasattr(s, field)]
    jax.tree.map(np.testing.assert_array_equal, getattr(has_field, field), weights)


def test_weights_that_are_to_be_averaged_are_not_taken_for_the_model(tmp_path: Path):
    for name, is_refused in (("schedule_free_sgd", True), ("adamw", False)):
        run, sizes = tmp_path / name, small_llama(base_num_decoder_layers=2, vocab_size=64)
        make_run(run, sizes, optimizer={"name": name, "arguments": {}})
        setup = setup_of(1, vars(sizes), NONE)
        refused = pytest.raises(ValueError, match=f"has weights of {name}, .* average of them")
        with refused if is_refused else nullcontext():
            first_state(setup.step, str(run))
        with refused if is_refused else nullcontext():
            to_hugging_face(run, tmp_path / f"{name} converted")


def moved(name: str, settings: Settings, here: str, there: str, folder: Path) -> None:
    """One step, a checkpoint, and two steps in another layout, are those of one run."""
    run = SETTINGS | {"optimizer": name, "learning_rate_schedule_steps": STEPS} | settings

    def losses(engine: str, steps: int, folder: Path) -> list[float]:
        devices, layout = ENGINES[engine]
        config = config_of(devices, run, layout, {"steps": steps, "output_dir": str(folder)})
        with pytest.MonkeyPatch.context() as patch:
            few = jax.devices()[:devices]
            patch.setattr(jax, "devices", lambda *_: few)
            return [m["loss"] for m in train(config, stream=io.StringIO())]

    one = losses(here, 1, folder / "moved")
    found = one + losses(there, 3, folder / "moved")
    make, _ = OPTIMIZERS[name]
    setup = setup_of(1, run, NONE)
    first = user_params(setup, flat(setup, init_state(setup.step)))
    np.testing.assert_allclose(found, trained_plainly(make(), first)[0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "sgd"])
@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("circular, fsdp", "mpmd"),
        ("mpmd", "none, fsdp"),
        ("none", "scheduled"),
        ("scheduled", "circular, zero1"),
    ],
)
def test_a_checkpoint_goes_on_under_another_engine_and_mesh(
    name: str, here: str, there: str, tmp_path: Path
):
    moved(name, OPTIMIZERS[name][1], here, there, tmp_path)


@pytest.mark.parametrize("name", ["dog", pytest.param("prodigy", marks=SLOW)])
def test_programs_of_ranks_save_states_that_no_update_changes(name: str, tmp_path: Path):
    settings = OPTIMIZERS[name][1] | {"bad_step_policy": "skip"}
    moved(name, settings, "mpmd", "none, fsdp", tmp_path)


def test_a_run_does_not_go_on_with_another_optimizer(tmp_path: Path):
    place = {"output_dir": str(tmp_path), "learning_rate_schedule_steps": 4} | NONE | NO_DECAY
    place |= {"base_num_decoder_layers": 1, "ici_fsdp_parallelism": 8}
    place |= {"num_pipeline_microbatches": 1}

    def run(**settings: Any) -> list[Any]:
        return list(train(config_of(8, place, settings), stream=io.StringIO()))

    run(steps=1, optimizer="sgd")
    with pytest.raises(ValueError, match=r"optimizer 'sgd', and `optimizer` is 'lion'"):
        run(steps=2, optimizer="lion")
    assert len(run(steps=2, optimizer="sgd")) == 1


BYTES = {  # for a parameter of a matrix of layers in float32, and of the table
    "adamw": (8, 8),
    "muon": (4, 8),
    "lion": (4, 4),
    "sgd": (0, 0),
    "schedule_free_adamw": (8, 8),
}


@pytest.mark.parametrize("name", BYTES)
def test_the_bytes_of_a_state_are_those_of_its_moments(name: str):
    setup = setup_of(1, NONE, NO_DECAY, {"base_mlp_dim": 4096, "optimizer": name})
    layer, ends = state_bytes(setup.state.weights.abstract_unstacked, setup.config)
    assert layer.per_parameter == pytest.approx(BYTES[name][0], rel=2e-3)  # norms have two moments
    assert ends.per_parameter == pytest.approx(BYTES[name][1], rel=2e-3)
    assert layer.whole < 64 and ends.whole < 64


def test_the_dtype_of_means_is_also_that_of_what_muon_leaves_to_adamw():
    muon = {"optimizer": "muon", "optimizer_arguments": {"mu_dtype": "bfloat16"}}
    plan = setup_of(1, NONE, NO_DECAY, {"base_mlp_dim": 4096}, muon).state
    layer, ends = state_bytes(plan.weights.abstract_unstacked, plan.config)
    assert layer.per_parameter == pytest.approx(2, rel=2e-3)
    assert ends.per_parameter == 2 + 4


def test_a_factored_state_is_counted_whole():
    arguments = {"optimizer": "adafactor", "optimizer_arguments": {"min_dim_size_to_factor": 8}}
    setup = setup_of(1, NONE, NO_DECAY, arguments)
    layer, _ = state_bytes(setup.state.weights.abstract_unstacked, setup.config)
    (D, H, C), F = (16, 2, 8), 32
    # Of [D, H, C] the two largest dims are factored; a placeholder of one number is left of `v`.
    of_attention = 4 * (D * H + H * C + 1)
    of_mlp = 3 * (D + F + 1)
    of_norms = 2 * 2  # rows and columns are placeholders
    assert layer.whole == 4 * (of_attention + of_mlp + of_norms)
    assert layer.per_parameter * (4 * D * H * C + 3 * D * F + 2 * D) == 4 * 2 * D


@pytest.mark.slow
@pytest.mark.parametrize("name", factories())
def test_every_optimizer_of_optax_that_a_run_may_name_trains_a_pipeline(name: str):
    setup = setup_of(2, STAGES, NO_DECAY, {"optimizer": name, "base_num_decoder_layers": 2})
    batch_at = synthetic_batches(vocab_size=64, batch_size=ROWS, length=LENGTH, seed=0)
    with jax.set_mesh(setup.mesh):
        state, metrics = make_train_step(setup.step)(
            init_state(setup.step), shard_batch(setup.batch, batch_at(0))
        )
    assert np.isfinite(float(metrics["loss"]))
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state["weights"]))
