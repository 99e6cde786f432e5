"""Every engine through `jp.pipeline`, against the user's own program."""

import pytest

from .front_door import Row, check_row

FSDP, DATA, EXPERT, TENSOR = (("fsdp", 2),), (("data", 2),), (("expert", 2),), (("tensor", 2),)

QUICK = [
    Row("gpt", "circular", 2, FSDP, chunks=2),
    Row("weighted", "1f1b", 3, engine="mpmd", layers=(3, 2, 3), tx="lamb"),
    Row("experts", "circular", 2, EXPERT),
    Row("batch_norm", "1f1b", 2, DATA, engine="mpmd", tx="muon"),
    Row("contrastive", "zbv", 2, FSDP),
]

SCHEDULES = [
    ("gpipe", "auto"),
    ("1f1b", "auto"),
    ("zero_bubble_h1", "auto"),
    ("interleaved_1f1b", "auto"),
    ("zbv", "auto"),
    ("circular", "auto"),
    ("1f1b", "mpmd"),
    ("interleaved_1f1b", "mpmd"),
    ("zero_bubble_h1", "mpmd"),
    (None, "auto"),
]

PRODUCT = [
    Row("weighted", "interleaved_1f1b", 2, DATA, tx="adafactor"),
    Row("experts", "1f1b", 4, FSDP),
] + [
    Row(model, schedule, ranks, axes, engine, layers=8, tx=tx)
    for model, tx in (
        ("gpt", "muon"),
        ("weighted", "adamw"),
        ("experts", "adafactor"),
        ("batch_norm", "lamb"),
        ("contrastive", "adamw"),
    )
    for schedule, engine in SCHEDULES
    for ranks, axes in ((2, DATA), (4, FSDP), (2, EXPERT))
    if axes != EXPERT or model == "experts"
]

RANKS = [
    Row("gpt", schedule, ranks, engine=engine, layers=24, microbatches=m, rows=2 * m, float64=True)
    for schedule, engine in (("circular", "auto"), ("1f1b", "auto"), ("1f1b", "mpmd"))
    for ranks, m in ((3, 6), (8, 8))
]

UNEVEN = [
    Row(model, schedule, 2, FSDP, engine, layers=layers, tx="muon")
    for model in ("gpt", "experts")
    for schedule, engine, layers in (
        ("zero_bubble_h1", "auto", (3, 5)),
        ("circular", "auto", (3, 5)),
        ("interleaved_1f1b", "mpmd", (1, 3, 2, 2)),
    )
]


@pytest.mark.parametrize(
    "row",
    [
        *(pytest.param(row, id=str(row)) for row in QUICK),
        *(
            pytest.param(row, id=str(row), marks=pytest.mark.slow)
            for row in dict.fromkeys([*PRODUCT, *RANKS, *UNEVEN])
            if row not in QUICK
        ),
    ],
)
def test_a_pipeline_is_the_program_of_its_user(row: Row):
    check_row(row)
