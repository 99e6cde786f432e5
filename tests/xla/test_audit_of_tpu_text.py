"""What libtpu's compiler writes: programs in the folder `hlo`, and short texts."""

from pathlib import Path

import pytest

from jaxpipe.xla import audit, totals, uncounted_loops
from jaxpipe.xla.hlo import Audit

HLO = Path(__file__).parent / "hlo"


def read(name: str) -> Audit:
    return audit((HLO / f"{name}.hlo").read_text())


def entry(*lines: str, before: str = "") -> Audit:
    """The audit of a program whose entry has these lines."""
    body = "\n".join(f"  {line}" for line in lines)
    return audit(f"HloModule m\n\n{before}\nENTRY %main (p: f32[4]) -> f32[4] {{\n{body}\n}}\n")


def moved(of: Audit) -> list[tuple[str, int, bool]]:
    return [(site.kind, site.result_bytes, site.asynchronous) for site in of.sites]


def test_a_chain_of_fusions_that_share_a_collective_is_one_asynchronous_collective():
    found = read("v5e_continuation_fusions")
    whole = 4096 * 4096 * 2
    assert moved(found) == [("all-gather", whole, False), ("all-gather", whole, True)]


def test_a_fusion_that_slices_an_all_reduce_is_a_reduce_scatter():
    found = read("v5p_reduce_scatter_fusion")
    assert moved(found) == [
        ("all-gather", 2048 * 2048 * 2, False),
        ("reduce-scatter", 1024 * 2048 * 2, False),
        ("all-reduce", 1024 * 2048 * 2, False),
    ]
    scatter = found.sites[1]
    assert (scatter.shape, scatter.groups) == ("bf16[1024,2048]", "{{0,1},{2,3}}")
    assert "dot_general" in scatter.op_name


def test_a_call_on_the_sparsecore_is_asynchronous():
    assert moved(read("tpu7x_sparsecore_call")) == [("reduce-scatter", 512 * 4096 * 2, True)]


def test_trip_counts_come_from_conditions_where_xla_does_not_write_them():
    found = read("v5p_nested_loops")
    assert [(loop.trips, len(loop.loops)) for loop in found.loops] == [(3, 0), (5, 1)]
    (site,) = found.sites
    assert (site.executions, site.asynchronous) == (15, True)
    assert site.result_bytes == 256 * 1024 * 2  # not the operand's alias, nor the u32 contexts


def test_what_crosses_slices_is_counted_apart():
    found = totals(read("v5p_nested_loops_in_two_slices"))["collective-permute"]
    assert (found.sites, found.executions) == (2, 30)
    assert found.across_slices_bytes == 15 * 128 * 1024 * 2


def test_a_limit_that_is_an_argument_is_unknown():
    assert uncounted_loops(read("v5p_loop_of_unknown_length")) == ("while.10",)


def test_the_larger_branch_counts():
    found = read("v5p_conditional")
    assert [(site.executions, site.conditional) for site in found.sites] == [(1, True)] * 2


def test_the_result_of_an_all_to_all_start_is_its_second_element():
    assert moved(read("v5e_all_to_all_start")) == [("all-to-all", 512 * 4096 * 2, True)]


GATHER_START = (
    "%p = f32[4]{0} parameter(0)",
    "%s = (f32[4]{0}, f32[16]{0:T(128)S(1)}) all-gather-start(%p), replica_groups=[1,4]<=[4], "
    'dimensions={0}, metadata={op_name="jit(f)/a \\"b\\" (c)"}',
    "ROOT %d = f32[16]{0} all-gather-done(%s)",
)


def test_an_all_gather_start_counts_its_result():
    found = entry(*GATHER_START)
    assert moved(found) == [("all-gather", 64, True)]
    assert found.sites[0].groups == "[1,4]<=[4]"
    assert found.sites[0].op_name == 'jit(f)/a \\"b\\" (c)'


def test_an_all_gather_start_of_several_arrays_counts_all_results():
    start = (
        "%s = ((f32[4]{0}, bf16[2]{0}), (f32[16]{0}, bf16[8]{0}), u32[]{:S(2)}) "
        "all-gather-start(%p, %q), dimensions={0}"
    )
    assert moved(entry(start, "ROOT %d = (f32[16]{0}, bf16[8]{0}) all-gather-done(%s)")) == [
        ("all-gather", 64 + 16, True)
    ]


def test_an_all_reduce_start_has_the_shape_of_its_result():
    start = "%s = (f32[4]{0}, f32[8]{0}) all-reduce-start(%p, %q), to_apply=%add"
    done = "ROOT %d = (f32[4]{0}, f32[8]{0}) all-reduce-done(%s)"
    assert moved(entry(start, done)) == [("all-reduce", 48, True)]


def test_a_collective_of_several_arrays_counts_all_of_them():
    line = (
        "ROOT %a = (f32[]{:T(128)}, bf16[8,4]{1,0:T(8,128)(2,1)}, /*index=2*/pred[3]{0}) "
        "all-reduce(%x, %y, /*index=2*/%z), replica_groups=mesh['data'=1,'stage'=2] {'stage'}, "
        "use_global_device_ids=true, to_apply=%add"
    )
    found = entry(line)
    assert moved(found) == [("all-reduce", 4 + 64 + 3, False)]
    assert found.sites[0].groups == "mesh['data'=1,'stage'=2] {'stage'}"
    assert found.sites[0].shape == "(f32[], bf16[8,4], pred[3])"


WRAPPED = """%wrapped (a: f32[16]) -> f32[4] {
  %a = f32[16]{0} parameter(0)
  ROOT %r = f32[4]{0} reduce-scatter(%a), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
}, execution_thread="parallel"
"""


def test_a_generic_asynchronous_start_runs_what_it_wraps():
    found = entry(
        "%p = f32[16]{0} parameter(0)",
        "%s = ((f32[16]{0}), f32[4]{0}, u32[]) async-start(%p), calls=%wrapped",
        "%u = ((f32[16]{0}), f32[4]{0}, u32[]) async-update(%s)",
        "ROOT %d = f32[4]{0} async-done(%u)",
        before=WRAPPED,
    )
    assert moved(found) == [("reduce-scatter", 16, True)]


def test_an_all_reduce_that_is_sliced_outside_of_a_fusion_is_an_all_reduce():
    found = entry(
        "%p = f32[16]{0} parameter(0)",
        "%a = f32[16]{0} all-reduce(%p), to_apply=%add",
        "ROOT %d = f32[4]{0} dynamic-slice(%a, %i), dynamic_slice_sizes={4}",
    )
    assert moved(found) == [("all-reduce", 64, False)]


@pytest.mark.parametrize(
    ("name", "kind"), [("ragged-all-to-all", "s4[6]"), ("collective-broadcast", "f8e4m3fn[3]")]
)
def test_rare_kinds_and_small_dtypes_count(name, kind):
    assert moved(entry(f"ROOT %r = {kind}{{0}} {name}(%p)")) == [(name, 3, False)]


def test_transfers_to_the_host_are_no_collectives():
    found = entry(
        "%t = token[] after-all()",
        "%r = (f32[4]{0}, u32[], token[]) recv(%t), channel_id=1, is_host_transfer=true",
        "ROOT %d = (f32[4]{0}, token[]) recv-done(%r), channel_id=1, is_host_transfer=true",
    )
    assert moved(found) == []


LOOP = """%body (c: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {{
  %c = (s32[], f32[4]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = f32[4]{{0}} get-tuple-element(%c), index=1
  %n = s32[] get-tuple-element(%c), index=2
  %step = s32[] constant({step})
  %j = s32[] add(%i, %step)
  %y = f32[4]{{0}} collective-permute(%x), source_target_pairs={{{{0,1}}}}
  ROOT %t = (s32[], f32[4]{{0}}, s32[]) tuple(%j, %y, %n)
}}

%condition (k: (s32[], f32[4], s32[])) -> pred[] {{
  %k = (s32[], f32[4]{{0}}, s32[]) parameter(0)
  %a = s32[] get-tuple-element(%k), index=0
  %b = s32[] get-tuple-element(%k), index=2
  ROOT %l = pred[] compare({operands}), direction={direction}
}}
"""


@pytest.mark.parametrize(
    ("start", "limit", "step", "direction", "trips"),
    [
        (0, 7, 1, "LT", 7),
        (0, 7, 1, "LE", 8),
        (0, 7, 2, "LT", 4),
        (5, 7, 3, "LT", 1),
        (9, 7, 1, "LT", 0),
        (0, 6, 2, "NE", 3),
        (0, 7, 2, "NE", None),
        (7, 0, -1, "GT", 7),
        (7, 0, -2, "GE", 4),
        (0, 7, 0, "LT", None),
        (0, 7, -1, "LT", None),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_the_counter_the_limit_and_the_step_give_the_trip_count(
    start, limit, step, direction, trips, swapped
):
    """The limit is carried through the loop, and the start is copied, as libtpu likes to do."""
    mirror = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}
    loop = LOOP.format(
        step=step,
        operands="%b, %a" if swapped else "%a, %b",
        direction=mirror[direction] if swapped else direction,
    )
    found = entry(
        "%p = f32[4]{0} parameter(0)",
        f"%zero = s32[]{{:T(128)}} constant({start})",
        "%start = s32[] copy(%zero)",
        f"%limit = s32[] constant({limit})",
        "%first = (s32[], f32[4]{0}, s32[]) tuple(%start, %p, %limit)",
        "%w = (s32[], f32[4]{0}, s32[]) while(%first), condition=%condition, body=%body",
        "ROOT %r = f32[4]{0} get-tuple-element(%w), index=1",
        before=loop,
    )
    assert [loop.trips for loop in found.loops] == [trips]
    assert found.sites[0].executions == (1 if trips is None else trips)
