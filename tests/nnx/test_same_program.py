"""Both frontends make the same program of the same layer: XLA's own text, with names taken out."""

import itertools
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from harness import frontends
from harness.frontends import Row
from jaxpipe import linen as linen_rim
from jaxpipe import nnx as nnx_rim

ROW = Row(4, 2, 1, fsdp=2)
WIDTHS = {
    "down": (frontends.MLP, frontends.EMBED, ("mlp", "embed")),
    "k": (frontends.EMBED, frontends.EMBED, ("embed", "heads")),
    "out": (frontends.EMBED, frontends.EMBED, ("heads", "embed")),
    "q": (frontends.EMBED, frontends.EMBED, ("embed", "heads")),
    "up": (frontends.EMBED, frontends.MLP, ("embed", "mlp")),
    "v": (frontends.EMBED, frontends.EMBED, ("embed", "heads")),
}


def decoder(dense: Any, norm: Any, x: Any, segment_ids: Any, positions: Any) -> Any:
    """`dense(name, x)`, `norm(name, x)`"""
    h = norm("norm1", x)
    mixed = frontends.attention(dense("q", h), dense("k", h), dense("v", h), segment_ids, positions)
    x = x + dense("out", mixed)
    return x + dense("down", jax.nn.gelu(dense("up", norm("norm2", x))))


class LinenDecoder(nn.Module):
    @nn.compact
    def __call__(self, x, segment_ids, positions, deterministic, model_mode):
        def dense(name, x):
            _, width, axes = WIDTHS[name]
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), axes)
            return nn.Dense(width, use_bias=False, kernel_init=init, name=name)(x)

        return decoder(dense, lambda name, x: nn.RMSNorm(name=name)(x), x, segment_ids, positions)


class NnxDecoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        for name, (fan_in, width, axes) in WIDTHS.items():
            metadata = {"out_sharding": axes}
            layer = nnx.Linear(fan_in, width, use_bias=False, kernel_metadata=metadata, rngs=rngs)
            setattr(self, name, layer)
        self.norm1, self.norm2 = (nnx.RMSNorm(frontends.EMBED, rngs=rngs) for _ in range(2))

    def __call__(self, x, segment_ids, positions, deterministic, model_mode):
        call = lambda name, x: getattr(self, name)(x)  # noqa: E731
        return decoder(call, call, x, segment_ids, positions)


def compiled(frontend: str) -> Any:
    """The step's gradient, compiled."""
    inputs, *batch_inputs = ROW.batch()
    if frontend == "linen":
        pipeline = linen_rim.create_pipeline(ROW.config(), LinenDecoder(), ROW.mesh())
        weights = pipeline.init(jax.random.key(0), inputs, *batch_inputs)
        call: Any = pipeline.apply
    else:
        pipeline = nnx_rim.create_pipeline(ROW.config(), NnxDecoder, ROW.mesh())
        graph, weights = nnx.split(pipeline)
        call = lambda w, *batch: nnx.merge(graph, w, copy=True)(*batch)  # noqa: E731

    def loss(weights, inputs):
        return jnp.sum(jnp.sin(call(weights, inputs, *batch_inputs)))

    return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(weights, inputs).compile()


def program(text: str) -> list[str]:
    """Lines of its computations, without metadata, names numbered in the order they appear.

    XLA writes the parameters of a computation in any order; here they are in their own.
    """
    text = re.sub(r", (metadata|frontend_attributes)=\{[^}]*\}", "", text)
    text = re.sub(r'"[^"]*"', '""', text)
    text = "\n".join(re.findall(r"^(?:ENTRY | *(?:ROOT )?)%.*$", text, re.MULTILINE))
    numbers: dict[str, str] = {}
    name = r"%([\w.\-]+)|([\w.\-]+)(?=: )"
    number = lambda found: numbers.setdefault(found[1] or found[2], f"%{len(numbers)}")  # noqa: E731
    lines = re.sub(name, number, text).splitlines()
    groups = itertools.groupby(lines, lambda line: parameter(line) >= 0)
    return [
        line
        for are_parameters, group in groups
        for line in (sorted(group, key=parameter) if are_parameters else group)
    ]


def parameter(line: str) -> int:
    """The index of the parameter that a line declares, -1 if it declares none."""
    found = re.search(r" parameter\((\d+)\)", line)
    return int(found[1]) if found else -1


def operations(lines: list[str]) -> Counter:
    found = (re.search(r"= .*? ([a-z][a-z\-]+)\(%", line) for line in lines)
    return Counter(match[1] for match in found if match)


def test_linen_and_nnx_compile_to_the_same_program():
    one, other = compiled("linen"), compiled("nnx")
    lines, others = program(one.as_text()), program(other.as_text())
    count = operations(lines)
    assert count == operations(others)
    assert count["while"] and count["collective-permute"] and count["all-gather"]
    memory, same = one.memory_analysis(), other.memory_analysis()
    assert memory.temp_size_in_bytes == same.temp_size_in_bytes
    assert memory.argument_size_in_bytes == same.argument_size_in_bytes
    assert lines == others
