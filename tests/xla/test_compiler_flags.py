"""The table of compiler flags: which are set for which step, what is printed, and probes."""

import dataclasses
import json

import jax
import pytest

from jaxpipe.devices import hardware
from jaxpipe.xla import compiler_flags as flags
from jaxpipe.xla.compile_report import CompileReport, Memory
from jaxpipe.xla.compiler_flags import FLAGS, CompilerFlag, StepTraits
from jaxpipe.xla.hlo import Audit
from jaxpipe.xla.step_time import StepTime


def default_options(rows, traits):
    """The options of a step for this machine's devices, which are asked what they accept."""
    return flags.default_options(rows, traits, jax.devices()[0])


H100 = StepTraits("gpu", "NVIDIA H100 80GB HBM3", "circular")
MPMD = dataclasses.replace(H100, engine="mpmd", program_per_rank=True)
TRIED = (jax.__version__,)


def test_deterministic_runs_on_gpus_tell_xla():
    name = "xla_gpu_deterministic_ops"
    for engine in ("circular", "mpmd"):
        traits = StepTraits("gpu", "NVIDIA H100 80GB HBM3", engine, deterministic=True)
        assert default_options(FLAGS, traits)[name] == "True"
        assert name not in default_options(FLAGS, dataclasses.replace(traits, deterministic=False))
    on_cpu = StepTraits("cpu", "cpu", "circular", deterministic=True)
    assert default_options(FLAGS, on_cpu) == {}


def test_programs_of_ranks_have_no_command_buffers():
    name = "xla_gpu_enable_command_buffer"
    assert default_options(FLAGS, MPMD)[name] == ""
    assert name not in default_options(FLAGS, H100)


def test_thresholds_are_the_bytes_of_a_layer():
    traits = dataclasses.replace(H100, layer_bytes=1000)
    groups = flags.option_groups(FLAGS, traits)
    assert set(groups["combine thresholds"].values()) == {"1000"}


def test_a_row_is_an_option_of_its_platform_with_reason_and_versions():
    names = [(flag.platform, flag.option, flag.group) for flag in FLAGS]
    assert len({*names}) == len(names)
    for flag in FLAGS:
        assert flag.platform in ("tpu", "gpu", "cpu")
        assert not flag.option.startswith("-")
        assert flag.reason.endswith(".")
        assert flag.accepted_by


def flag(**changes) -> CompilerFlag:
    row = CompilerFlag("a group", "xla_a", "1", "cpu", "It is faster.", TRIED)
    return dataclasses.replace(row, **changes)


CPU = StepTraits("cpu", "cpu", "circular")


@pytest.mark.parametrize(
    ("row", "options"),
    [
        (flag(), {"xla_a": "1"}),
        (flag(value=lambda traits: traits.engine), {"xla_a": "circular"}),
        (flag(platform="gpu"), {}),
        (flag(device_kinds=("TPU v5",)), {}),
        (flag(device_kinds=("cpu",)), {"xla_a": "1"}),
        (flag(is_default=lambda traits: traits.engine == "mpmd"), {}),
    ],
)
def test_a_flag_is_set_where_it_is_meant(row, options):
    assert default_options((row,), CPU) == options


@pytest.mark.parametrize(("cores", "program_per_rank"), [(1, True), (2, True), (1, False)])
def test_only_a_rank_with_one_core_orders_instructions_for_memory(cores, program_per_rank):
    traits = StepTraits("cpu", "cpu", "mpmd", program_per_rank=program_per_rank, cores=cores)
    option = "xla_cpu_enable_concurrency_optimized_scheduler"
    options = default_options(FLAGS, traits)
    assert options.get(option) == ("False" if (cores, program_per_rank) == (1, True) else None)


def test_flags_that_another_compiler_refuses_are_left_out_with_a_line(caplog):
    real = flag(option="xla_cpu_enable_fast_math", value="False", accepted_by=("0.0.1",))
    assert default_options((real,), CPU) == {"xla_cpu_enable_fast_math": "False"}
    assert not caplog.records
    gone = flag(option="xla_no_such_flag", accepted_by=("0.0.1",))
    needed = dataclasses.replace(real, is_required=True)
    assert default_options((gone, real, needed), CPU) == {"xla_cpu_enable_fast_math": "False"}
    assert default_options((gone, real), CPU) == {}
    (line, *_) = [record.getMessage() for record in caplog.records]
    assert line.startswith("Programs are compiled without jaxpipe's default flags: ")
    assert "No such compile option: 'xla_no_such_flag'" in line


def test_a_device_that_is_only_described_is_not_asked():
    gone = flag(option="xla_no_such_flag", accepted_by=("0.0.1",))
    assert flags.default_options((gone,), CPU, object()) == {"xla_no_such_flag": "1"}


def test_a_key_leaves_out_slow_flags_or_all():
    slow = flag(option="xla_slow", slows_compilation=True)
    needed = flag(option="xla_needed", is_required=True)
    rows = (flag(), slow, needed)
    names = {
        level: set(default_options(rows, dataclasses.replace(CPU, default_flags=level)))
        for level in ("all", "quick", "none")
    }
    assert names == {
        "all": {"xla_a", "xla_slow", "xla_needed"},
        "quick": {"xla_a", "xla_needed"},
        "none": {"xla_needed"},
    }


@pytest.mark.parametrize("kind", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_no_instruction_may_use_more_vector_memory_than_a_core_has(kind):
    row = hardware(kind)
    options = flags.option_groups(FLAGS, StepTraits("tpu", row.device_kinds[0], "circular"))
    limit = options.get("scoped VMEM", {}).get("xla_tpu_scoped_vmem_limit_kib")
    assert (limit is None) == (kind == "v4")
    assert limit is None or int(limit) * 1024 == row.vmem_bytes * 3 // 4
    assert ("SparseCore gathers" in options) == bool(row.sparse_cores)


@pytest.mark.parametrize(("kind", "dense", "experts"), [("v5p", False, True), ("v6e", True, True)])
def test_a_queue_of_sparse_cores_is_set_where_it_was_faster(kind, dense, experts):
    for has_experts, is_set in ((False, dense), (True, experts)):
        device_kind = hardware(kind).device_kinds[0]
        traits = StepTraits("tpu", device_kind, "circular", has_experts=has_experts)
        rows = [row for row in FLAGS if row.group == "SparseCore queue"]
        assert [row.is_set(traits) for row in rows] == [is_set, is_set]


@pytest.mark.parametrize(("kind", "is_set"), [("v5p", False), ("v6e", True), ("tpu7x", True)])
def test_products_are_not_cut_into_windows_where_that_was_slower(kind, is_set):
    (row,) = (row for row in FLAGS if row.group == "no windows")
    for device_kind in hardware(kind).device_kinds:
        assert row.is_set(StepTraits("tpu", device_kind, "none", pipelines=False)) == is_set
        assert not row.is_set(StepTraits("tpu", device_kind, "circular"))
        assert row.is_set(StepTraits("tpu", device_kind, "circular", sequence_parallel=True))


def test_versions_of_one_series_are_equal():
    row = flag(accepted_by=("0.0.48.1", "0.12.0.1"))
    assert flags.is_tried(row, "0.0.48.7")
    assert flags.is_tried(row, "0.12.3")
    assert not flags.is_tried(row, "0.0.49.1")
    assert not flags.is_tried(row, "0.1.12")
    assert not flags.is_tried(row, "")


def test_what_is_printed_says_what_is_set_and_why():
    rows = (
        flag(),
        flag(option="xla_b", accepted_by=("0.0.1",), gain="1 s."),
        flag(option="xla_c", is_default=flags.never),
        flag(option="xla_d"),
        flag(option="xla_e", platform="tpu"),
    )
    text = flags.flags_text(rows, CPU, {"xla_a": "1"}, {"xla_d": "7", "xla_f": "2"})
    lines = [line for line in text.splitlines() if not line.startswith(" ")]
    version = jax.__version__
    assert lines == [
        f"cpu, engine circular, jax {version}",
        "set      --xla_f=2 (yours)",
        "set      --xla_a=1",
        f"not set  --xla_b=1 (refused by jax {version})",
        "not set  --xla_c=1",
        "set      --xla_d=7 (yours)",
    ]
    reason = "         a group: It is faster."
    assert f"{reason} Accepted by jax {version}. Never run on a device." in text
    assert f"{reason} Gain: 1 s. Accepted by jax 0.0.1. Never run on a device." in text


def report(peak: int) -> CompileReport:
    memory = Memory(1, 1, 1, 1, peak)
    return CompileReport("cpu", 1, memory, Audit((), ()), 1.0, 0.5, jax.__version__, "")


def test_a_probe_compiles_without_flags_with_the_defaults_and_with_each_group():
    rows = (
        flag(),
        flag(option="xla_b", is_default=flags.never),
        flag(option="xla_bad", group="bad", is_default=flags.never),
    )
    compiled = []

    def compile_with(options):
        compiled.append(dict(options))
        if "xla_bad" in options:
            raise ValueError("No such compile option: 'xla_bad'\nand more")
        return report(1_000_000 * (1 + len(options)))

    groups = flags.option_groups(rows, CPU)
    probed = [*flags.probe_groups(compile_with, groups, default_options(rows, CPU), (ValueError,))]
    both = {"xla_a": "1", "xla_b": "1"}
    assert compiled == [{}, {"xla_a": "1"}, both, {"xla_bad": "1"}]
    assert [group.name for group in probed] == ["none", "defaults", "a group", "bad"]
    text = flags.probe_text(probed)
    assert "a group         0.5      3.0       -          -" in text
    assert "bad:\n  --xla_bad=1\n  REFUSED: No such compile option: 'xla_bad'" in text
    found = json.loads(json.dumps(flags.probe_json(probed)))
    assert found[2]["memory"]["peak_bytes"] == 3_000_000
    assert found[3]["error"] == "No such compile option: 'xla_bad'"


def test_a_group_that_is_the_defaults_is_compiled_once():
    rows = (flag(),)
    defaults, groups = default_options(rows, CPU), flags.option_groups(rows, CPU)
    probed = flags.probe_groups(lambda options: report(1), groups, defaults, ())
    assert [group.name for group in probed] == ["none", "defaults"]


def timed_report(seconds: float, peak: int) -> CompileReport:
    time = StepTime({"matrix products": seconds}, {}, {}, 0.0, {}, 0.0, ())
    return dataclasses.replace(report(peak), step_time=time)


def test_a_probe_combines_the_groups_that_do_no_harm_alone():
    changes = {
        "xla_fast": (-0.3, 1),
        "xla_same": (0, 0),
        "xla_large": (-0.5, 40),
        "xla_slow": (1, 0),
    }

    def compile_with(options):
        size = 1000 + sum(changes[name][1] for name in options)
        seconds = 2.0 + sum(changes[name][0] for name in options)
        return timed_report(seconds, size)

    groups = {name.removeprefix("xla_"): {name: "1"} for name in changes}
    *_, together = flags.probe_groups(compile_with, groups, {}, ())
    assert together.name == "together"
    assert together.options == {"xla_fast": "1", "xla_same": "1"}
