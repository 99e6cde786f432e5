"""What instructions cost on GPUs: operations and bytes as XLA's own analysis counts them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxpipe.xla.hlo._parse import parse_hlo
from jaxpipe.xla.step_time import GpuRates, device_rates, step_time, transfer_seconds
from jaxpipe.xla.step_time._instruction_costs import moved_bytes, product_flops

RATES = GpuRates(peak_tflops=100.0, memory_gb=1000.0, link_gb=10.0, network_gb=1.0)
FREE = ("parameter", "bitcast", "tuple", "constant")
X, W = jnp.ones((256, 128)), jnp.ones((4, 128, 64))

PROGRAMS = {
    "a product": lambda x, w, i: x @ w[1],
    "a slice of a stack": lambda x, w, i: jnp.tanh(lax.dynamic_index_in_dim(w, i, 0)) * 2,
    "a sum": lambda x, w, i: (x * x + 1).sum(0),
    "a slice is written": lambda x, w, i: lax.dynamic_update_index_in_dim(w, x[:128, :64], i, 0),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_bytes_and_operations_are_those_of_xla(program):
    donated = (1,) if program is PROGRAMS["a slice is written"] else ()
    lowered = jax.jit(program, donate_argnums=donated).lower(X, W, jnp.int32(1))
    compiled = lowered.compile()
    module = parse_hlo(compiled.as_text() or "")
    work = [x for x in module.entry.instructions.values() if x.opcode not in FREE]
    theirs = compiled.cost_analysis() or {}
    ours = sum(moved_bytes(module, module.entry, x) for x in work)
    assert ours == pytest.approx(theirs["bytes accessed"], rel=0.05), [x.opcode for x in work]
    if program is PROGRAMS["a product"]:
        assert sum(product_flops(module, module.entry, x) for x in work) == theirs["flops"]


def test_a_loop_counts_as_often_as_it_runs():
    def program(x, w):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    text = jax.jit(program).lower(jnp.ones((512, 512)), jnp.ones((7, 512, 512))).compile().as_text()
    found = step_time(text or "", GpuRates(1e-3, 1e9, 1.0, 1.0))
    assert found.seconds == pytest.approx(7 * 2 * 512**3 / (0.8 * 1e9), rel=1e-3)


def test_a_collective_is_a_transfer_and_no_work():
    mesh = jax.make_mesh((4,), ("fsdp",), devices=jax.devices()[:4])
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    x = jax.ShapeDtypeStruct((4096, 64), jnp.float32, sharding=rows)
    text = jax.jit(lambda x: jnp.tanh(x.sum(0))).lower(x).compile().as_text() or ""
    found = step_time(text, GpuRates(1e9, 1e9, 1e-3, 1e-3))
    (transfer,) = found.transfer_seconds.values()
    assert transfer == pytest.approx(2 * 3 / 4 * 64 * 4 / 1e6) == found.exposed
    assert not [
        cost for cost in found.costs if cost.work != "collectives" and "all-" in cost.opcode
    ]
    assert found.busy < 1e-3 * found.exposed


@pytest.mark.parametrize(
    ("kind", "hosts", "seconds"),
    [
        ("all-gather", (), 3 / 4 * 8e9 / 10e9),
        ("reduce-scatter", (), 3 * 8e9 / 10e9),
        ("all-reduce", (), 2 * 3 / 4 * 8e9 / 10e9),
        ("collective-permute", (), 8e9 / 10e9),
        # Two adapters on each of two hosts.
        ("all-gather", (0, 0, 1, 1), 3 / 4 * 8e9 / 2e9),
        ("collective-permute", (0, 0, 1, 1), 8e9 / 1e9),
    ],
)
def test_transfers_pass_the_links_or_the_adapters(kind, hosts, seconds):
    groups = "{{1,2}}" if kind == "collective-permute" else "{{0,1,2,3}}"
    rates = GpuRates(1.0, 1.0, 10.0, 1.0, hosts)
    taken = transfer_seconds(kind, 8 * 10**9, groups, rates, across_slices=False)
    assert taken == pytest.approx(seconds)


def test_gpus_have_rates_of_the_table_of_devices():
    rates = device_rates("NVIDIA H100 80GB HBM3", [0, 1])
    assert isinstance(rates, GpuRates)
    assert (rates.memory_gb, rates.link_gb, rates.hosts) == (3350, 450, (0, 1))


def test_the_slowest_group_counts_and_all_devices_are_one():
    hosts = (0, 0, 0, 0, 1, 1, 1, 1)
    rates = GpuRates(1.0, 1.0, 10.0, 1.0, hosts)

    def seconds(groups: str) -> float:
        return transfer_seconds("all-reduce", 8 * 10**9, groups, rates, across_slices=False)

    assert seconds("{{0,1},{2,4}}") == pytest.approx(8.0)  # 2 and 4 through an adapter each
    assert seconds("{}") == seconds("{{0,1,2,3,4,5,6,7}}")


def test_links_join_the_trays_of_a_rack():
    rates = device_rates("NVIDIA GB200", [0] * 4 + [1] * 4)
    assert isinstance(rates, GpuRates)
    assert {*rates.hosts} == {0}


ATTENTION = """HloModule m, is_scheduled=true

ENTRY %main (q: bf16[1,4096,16,128], k: bf16[1,4096,16,128]) -> bf16[1,16,4096,128] {
  %q = bf16[1,4096,16,128]{3,2,1,0} parameter(0)
  %k = bf16[1,4096,16,128]{3,2,1,0} parameter(1)
  ROOT %a = bf16[1,16,4096,128]{3,1,2,0} custom-call(%q, %k, %k), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={"mask_type": "MASK", \
"sliding_window_length": WINDOW}
}
"""


@pytest.mark.parametrize(
    ("mask", "window", "seen"),
    [
        ("NO_MASK", 0, lambda i: 4096),
        ("CAUSAL", 0, lambda i: i + 0.5),
        ("CAUSAL", 1024, lambda i: min(i + 0.5, 1024)),
    ],
)
def test_attention_counts_the_keys_that_a_query_sees(mask, window, seen):
    text = ATTENTION.replace("\\\n", "").replace('"MASK"', f'"{mask}"')
    text = text.replace("WINDOW", str(window))
    flops = sum(4 * 16 * 128 * seen(i) for i in range(4096))
    rates = GpuRates(1.0, 1e9, 1.0, 1.0)
    assert step_time(text, rates).seconds == pytest.approx(flops / (0.5 * 1e12), rel=1e-3)


def _program(call: str, operands: list[str], result: str) -> str:
    names = [f"%p{i}" for i in range(len(operands))]
    lines = [
        f"  {name} = {shape} parameter({i})"
        for i, (name, shape) in enumerate(zip(names, operands, strict=True))
    ]
    target = f'custom_call_target="__gpu$xla.gpu.triton", backend_config={{name = "{call}"}}'
    arguments = ", ".join(f"{n.strip('%')}: {s}" for n, s in zip(names, operands, strict=True))
    return "\n".join(
        [
            "HloModule m, is_scheduled=true\n",
            f"ENTRY %main ({arguments}) -> {result} {{",
            *lines,
            f"  ROOT %a = {result} custom-call({', '.join(names)}), {target}",
            "}",
        ]
    )


_ROWS, _WIDE, _WEIGHTS = "bf16[49152,2048]", "bf16[49152,1408]", "bf16[64,2048,1408]"
_HEADS, _SUMS = "bf16[4,4096,16,192]", "f32[4,16,4096]"
KERNELS = {
    # A forward and its backward on an H200: docs/benchmarks.md, "One GPU".
    "grouped products": (
        1.93e-3,
        [
            _program("jaxpipe_gmm", ["s32[449]", _ROWS, _WEIGHTS], _WIDE),
            _program("jaxpipe_gmm_transposed", ["s32[449]", _WIDE, _WEIGHTS], _ROWS),
            _program("jaxpipe_gmm_outer", ["s32[64]", _ROWS, _WIDE], _WEIGHTS),
        ],
    ),
    "attention": (
        15.19e-3,
        [
            _program("mha_forward", [_HEADS] * 3, f"({_HEADS}, {_SUMS})"),
            _program("mha_preprocess_backward", [_HEADS] * 2, _SUMS),
            _program("mha_backward", [*[_HEADS] * 5, _SUMS], f"({_HEADS}, {_HEADS}, {_HEADS})"),
        ],
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_take_what_an_h200_took(name):
    measured, programs = KERNELS[name]
    rates = device_rates("NVIDIA H200", [0])
    assert rates is not None
    found = sum(step_time(text, rates).seconds for text in programs)
    assert found == pytest.approx(measured, rel=0.25)
