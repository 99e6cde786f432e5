"""Memory and reports: what XLA says, as a table and as JSON."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from jaxpipe.xla import memory
from jaxpipe.xla.compile_report import CompileReport, Memory, report_json, report_text
from jaxpipe.xla.hlo import Audit, CollectiveSite, WhileLoop

SITE = CollectiveSite(
    kind="all-gather",
    name="all-gather.1",
    shape="bf16[4096,4096]",
    result_bytes=33_554_432,
    executions=100,
    asynchronous=False,
    beside_product=False,
    loops=("while.1",),
    conditional=False,
    across_slices=False,
    groups="{{0,1}}",
    op_name="jit(step)/all_gather",
)


def report(trips: int | None = 100) -> CompileReport:
    return CompileReport(
        platform="TPU v5",
        num_devices=4,
        memory=Memory(
            argument_bytes=21_003_500_000,
            output_bytes=21_002_500_000,
            alias_bytes=21_002_500_000,
            temp_bytes=42_070_700_000,
            peak_bytes=48_427_700_000,
        ),
        audit=Audit((SITE,), (WhileLoop("while.1", trips, (), "jit(step)/while"),)),
        model_flops=4.055e15,
        compile_seconds=86.7,
        jax_version="0.12.0",
        libtpu_version="0.0.50",
    )


TEXT = """\
4 x TPU v5, jax 0.12.0, libtpu 0.0.50
compiled in 86.7 s; 4.055e+15 model FLOPs a step

memory per device      MB
  argument       21,003.5
  output         21,002.5
  alias          21,002.5
  temp           42,070.7
  peak           48,427.7
  capacity      102,005.5; the peak is 47% of it

collectives  sites  per step     GB  async  hidden  in loops    dcn
all-gather       1       100  3.355  0.000   0.000     3.355  0.000
all              1       100  3.355  0.000   0.000     3.355  0.000

largest     sites  per step     GB  async  loops  branch  shape            from
all-gather      1       100  3.355     no      1      no  bf16[4096,4096]  jit(step)/all_gather

1 loop(s)  trips  inside  from
while.1      100          jit(step)/while"""


def test_a_report_reads_like_this():
    assert report_text(report()) == TEXT


def test_sites_that_differ_in_their_name_alone_share_a_row():
    other = dataclasses.replace(SITE, name="all-gather.2")
    one = report()
    two = dataclasses.replace(one, audit=Audit((SITE, other), one.audit.loops))
    assert "all-gather      2       200  6.711     no      1" in report_text(two)


def test_a_loop_of_unknown_length_is_said_aloud():
    text = report_text(report(None))
    assert "AT LEAST: the trip count of while.1 is unknown; what is in it is counted once." in text
    assert json.loads(report_json(report(None)))["uncounted_loops"] == ["while.1"]


def test_json_has_everything():
    found = json.loads(report_json(report()))
    assert found["memory"]["peak_bytes"] == 48_427_700_000
    assert found["totals"]["all-gather"]["result_bytes"] == 3_355_443_200
    assert found["audit"]["sites"][0]["loops"] == ["while.1"]
    assert found["audit"]["loops"][0]["trips"] == 100
    assert found["libtpu_version"] == "0.0.50"


def test_memory_is_what_xla_says_and_on_a_cpu_the_peak_is_a_sum():
    f = jax.jit(lambda x: (jnp.sin(x) @ x, x + 1), donate_argnums=0)
    found = memory(f.lower(jnp.ones((64, 64))).compile(), "cpu")
    size = 64 * 64 * 4
    assert (found.argument_bytes, found.alias_bytes) == (size, size)
    assert found.output_bytes >= 2 * size
    assert found.temp_bytes >= size
    assert found.peak_bytes == found.output_bytes + found.temp_bytes


def test_the_host_does_not_count_as_the_memory_of_a_device():
    """XLA:TPU's peak of a program that offloads 17 GB: arguments and results are 9 GB."""

    class Stats:
        argument_size_in_bytes, output_size_in_bytes = 5_000, 4_000
        alias_size_in_bytes, temp_size_in_bytes = 0, 12_000
        host_temp_size_in_bytes, peak_memory_in_bytes = 17_000, 26_000

    class Compiled:
        def memory_analysis(self):
            return Stats

    found = memory(Compiled(), "tpu")
    assert (found.peak_bytes, found.host_bytes) == (21_000, 17_000)


def test_a_backend_that_does_not_tell_its_memory_is_refused():
    class Silent:
        def memory_analysis(self):
            return None

    with pytest.raises(ValueError, match="has no memory analysis"):
        memory(Silent(), "cpu")
