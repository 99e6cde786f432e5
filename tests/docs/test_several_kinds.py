"""The scripts of the page about kinds of layers: 20 steps with a pipeline are those without."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxpipe as jp

PAGE = Path(__file__).parents[2] / "docs" / "several-kinds.md"


def blocks() -> dict[str, str]:
    found = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    of_functions = ["model", "plain", "pipelined", "vision", "mtp", "layout", "order", "unet"]
    return dict(zip([*of_functions, "modules", "skips", "shared"], found, strict=True))


def run(block: str, names: dict[str, Any]) -> None:
    exec(compile(blocks()[block], f"{PAGE.name}: {block}", "exec"), names)


def close(got: Any, wanted: Any, most: float) -> None:
    def compare(path: Any, a: Any, b: Any) -> None:
        a, b = np.asarray(a), np.asarray(b)
        error = np.abs(a - b).max() / np.abs(b).max()
        assert error <= most, f"{jax.tree_util.keystr(path)}: {error:.1e}"

    jax.tree_util.tree_map_with_path(compare, got, wanted)


def test_twenty_steps_with_a_pipeline_are_those_of_the_plain_script():
    names: dict[str, Any] = {}
    run("model", names)
    run("plain", names)
    wanted = names["params"], names["losses"]
    assert wanted[1][-1] != wanted[1][0] and len(wanted[1]) == 20
    run("pipelined", names)
    close((names["pipe"].unshard(names["params"]), names["losses"]), wanted, 1e-6)


def test_the_page_says_how_many_lines_the_pipeline_changes():
    def lines(block: str) -> list[str]:
        code = [line for line in blocks()[block].splitlines() if line and line[0] != "#"]
        return [line for line in code if not line.startswith(("model =", "mesh =", "pipe ="))]

    plain, pipelined = lines("plain"), lines("pipelined")
    rest = plain[plain.index('    return loss(params["head"], x, batch)') + 1 :]
    assert len(rest) == len(pipelined)
    changed = sum(a != b for a, b in zip(rest, pipelined, strict=True))
    said = re.search(r"of the other (\d+) lines (\d+)\s+are different", PAGE.read_text())
    assert said is not None and said.groups() == (str(len(rest)), str(changed))


def test_the_other_models_of_the_page_compute_the_loss_of_the_plain_program():
    names: dict[str, Any] = {}
    for block in ("model", "vision", "mtp"):
        run(block, names)
    names["mesh"] = jp.make_mesh({"stage": 2}, devices=jax.devices()[:2])
    run("layout", names)
    normal = jax.random.normal
    key, d = jax.random.key(0), names["D"]
    tokens = jax.random.randint(key, (8, 7), 0, names["V"])

    layers = {
        "trunk": normal(key, (4, d, d)),
        "mtp": {x: normal(key, (2, d, d)) for x in ("h", "ahead")},
    }
    params = {"embed": normal(key, (names["V"], d)), "layers": layers, "head": ()}
    check(names["mtp"], names["pipe"], params, {"tokens": tokens})

    layers = {
        "vision": normal(key, (2, d, d)),
        "projector": normal(key, (1, d, d)),
        "language": normal(key, (3, d, d)),
    }
    embed = {"patch": normal(key, (3, d)), "token": normal(key, (names["V"], d))}
    params = {"embed": embed, "layers": layers, "head": normal(key, (d, names["V"]))}
    batch = {
        "tokens": tokens,
        "patches": normal(key, (8, 6, 3)),
        "is_image": normal(key, (8, 6)) > 0,
    }
    pipe = jp.pipeline(names["vlm"], schedule="1f1b", mesh=names["mesh"], microbatches=4)
    check(names["vlm"], pipe, params, batch)


def check(model: Any, pipe: Any, params: Any, batch: Any) -> None:
    x = model.embed(params["embed"], batch, ())
    for kind, layer in model.layer.items():
        leaves, tree = jax.tree.flatten(params["layers"][kind])
        for weights in zip(*leaves, strict=True):
            x = layer(tree.unflatten(weights), x, batch, ())
    head = {"head": params["head"], "embed": params["embed"]} if model.tied else params["head"]
    wanted = model.loss(head, x, batch, ())
    got, metrics = pipe.jit(pipe.value)(pipe.shard(params), batch)
    wanted = wanted if isinstance(wanted, tuple) else (wanted, {})
    close(jax.tree.map(float, (got, metrics)), wanted, 1e-5)


def test_layers_that_alternate_compute_the_loss_of_the_plain_program():
    names: dict[str, Any] = {}
    for block in ("model", "order", "modules", "skips", "shared"):
        run(block, names)
    mesh = jp.make_mesh({"stage": 2}, devices=jax.devices()[:2])
    batch = {"tokens": jax.random.randint(jax.random.key(3), (8, 7), 0, names["V"])}
    keys = iter(jax.random.split(jax.random.key(4), 16))
    D, V = names["D"], names["V"]

    def matrix(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / D**0.5

    layers = [matrix(D, D), matrix(D, D), {"value": matrix(D, D), "out": matrix(D, D)}] * 2
    params = {"embed": matrix(V, D), "layers": layers, "head": matrix(D, V)}
    pipe = jp.pipeline(names["alternating"], schedule="1f1b", mesh=mesh, microbatches=4)
    x = params["embed"][batch["tokens"][:, :-1]]
    for i, w in enumerate(layers):
        x = names["global_layer" if i % 3 == 2 else "local_layer"](w, x, batch)
    wanted = names["next_token_loss"](params["head"], x, batch)
    close(pipe.jit(pipe.value)(pipe.shard(params), batch)[0], wanted, 1e-5)

    pipe = jp.pipeline(names["found"], schedule="circular", mesh=mesh, microbatches=4)
    wanted = names["next_token_loss"](np.eye(D, V, dtype=np.float32), names["module"](batch), batch)
    close(pipe.jit(pipe.value)(pipe.shard(names["module_params"]), batch)[0], wanted, 1e-5)

    pipe = jp.pipeline(names["zamba"], schedule="1f1b", mesh=mesh, microbatches=4)
    zamba = names["Zamba"](names["nnx"].Rngs(0))
    wanted = names["next_token_loss"](np.eye(D, V, dtype=np.float32), zamba(batch), batch)
    close(pipe.jit(pipe.value)(pipe.shard(names["zamba_params"]), batch)[0], wanted, 1e-5)

    pipe = jp.pipeline(names["reading"], schedule="1f1b", mesh=mesh, microbatches=4)
    batch |= {"patches": jax.random.normal(jax.random.key(6), (8, 5, 3))}
    reading = names["VisionLanguageModel"](names["nnx"].Rngs(0))
    wanted = names["next_token_loss"](np.eye(D, V, dtype=np.float32), reading(batch), batch)
    close(pipe.jit(pipe.value)(pipe.shard(names["reading_params"]), batch)[0], wanted, 1e-5)


def test_the_unet_computes_the_loss_of_the_plain_program():
    names: dict[str, Any] = {}
    for block in ("model", "unet"):
        run(block, names)
    keys = iter(jax.random.split(jax.random.key(5), 16))

    def kernel(before: int, after: int) -> jax.Array:
        return jax.random.normal(next(keys), (3, 3, before, after)) / (9 * before) ** 0.5

    layers: dict[str, Any] = {"middle": [kernel(16, 16)]}
    for i, c in enumerate((4, 8)):
        layers[f"down_{i}"] = [{"conv": kernel(c, c), "half": kernel(c, 2 * c)}]
        layers[f"up_{i}"] = [{"half": kernel(2 * c, c), "conv": kernel(2 * c, c)}]
    params = {"embed": kernel(3, 4), "layers": layers, "head": kernel(4, 3)}
    image, target = jax.random.normal(next(keys), (2, 8, 8, 8, 3))
    batch = {"image": image, "target": target}
    x = names["image_embed"](params["embed"], batch)
    for kind, layer in names["levels"].items():
        x = layer(layers[kind][0], x, batch)
    wanted = names["image_loss"](params["head"], x, batch)
    mesh = jp.make_mesh({"stage": 2}, devices=jax.devices()[:2])
    for engine in ("scheduled", "mpmd"):
        pipe = jp.pipeline(names["unet"], schedule="1f1b", engine=engine, mesh=mesh, microbatches=4)
        close(pipe.jit(pipe.value)(pipe.shard(params), batch)[0], wanted, 1e-5)
