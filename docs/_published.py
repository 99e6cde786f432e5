"""Reads the measurements in tests/cost/published, and says what each of them is predicted from."""

import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from jaxpipe.cost.training_step import (
    Efficiency,
    Layout,
    Remat,
    StageSeconds,
    build_schedule,
    num_transfers,
    predict,
)
from jaxpipe.cost.work import (
    Experts,
    LatentAttention,
    ModelWork,
    flops_per_token,
    transformer,
)
from jaxpipe.devices import HARDWARE, Hardware, hardware
from jaxpipe.schedules import Costs, Schedule, search
from jaxpipe.schedules.analysis.search import ActivationMemory

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "tests" / "cost" / "published"

MEGATRON_ORDER = ("stage", "data", "fsdp", "expert", "context", "tensor")


def _gpt(layers: int, hidden: int, heads: int) -> ModelWork:
    return transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        mlp=4 * hidden,
        vocab=51200,
        gated=False,
        tied=True,
        dropout=True,
        fused_attention=False,
    )


def _qwen(layers: int, hidden: int, heads: int, width: int) -> ModelWork:
    return transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=4,
        head_channels=128,
        mlp=0,
        vocab=151936,
        experts=Experts(128, 8, width),
    )


def _deepseek(mtp: bool) -> ModelWork:
    """Megatron's recipe has a layer and a head that predict one token more."""
    work = transformer(
        layers=62 if mtp else 61,
        hidden=7168,
        heads=128,
        mlp=18432,
        vocab=129280,
        latent=LatentAttention(1536, 512, 128, 64, 128),
        experts=Experts(256, 8, 2048, shared=1, dense_layers=3),
    )
    return replace(work, vocab=2 * work.vocab) if mtp else work


def _llama(layers: int, hidden: int, heads: int, width: int) -> ModelWork:
    return transformer(
        layers=layers, hidden=hidden, heads=heads, kv_heads=8, mlp=width, vocab=128256
    )


_405B = _llama(126, 16384, 128, 53248)
_GPT3 = transformer(
    layers=96, hidden=12288, heads=96, mlp=49152, vocab=50304, gated=False, tied=True
)
MODELS: dict[str, ModelWork] = {
    "megatron-22B": _gpt(48, 6144, 64),
    "turing-530B": _gpt(105, 20480, 128),
    "llama3.1-405b": _405B,
    "LLAMA3.1_405B": _405B,
    "LLAMA3_8B": _llama(32, 4096, 32, 14336),
    "llama3.1-8b": _llama(32, 4096, 32, 14336),
    "LLAMA3_70B": _llama(80, 8192, 64, 28672),
    "llama3.1-70b": _llama(80, 8192, 64, 28672),
    "DeepSeekV3 (w/o MTP)": _deepseek(mtp=False),
    "DeepSeekV3": _deepseek(mtp=True),
    "deepseek3-671b": _deepseek(mtp=False),
    "GPT OSS 120B": transformer(
        layers=36,
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_channels=64,
        mlp=0,
        vocab=201088,
        window=128,
        experts=Experts(128, 4, 2880),
    ),
    "Qwen3_30B_a3B": _qwen(48, 2048, 32, 768),
    "Qwen3_235B_a22B": _qwen(94, 4096, 64, 1536),
    "gpt3-175b": _GPT3,
    "GPT3-175B": _GPT3,
    "LLAMA2-13B": transformer(layers=40, hidden=5120, heads=40, mlp=13824, vocab=32000),
    "llama2-7b": transformer(layers=32, hidden=4096, heads=32, mlp=11008, vocab=32000),
    "LLAMA3-70B": _llama(80, 8192, 64, 28672),
    "megatron-1T": _gpt(128, 25600, 160),
}
"""The sizes of the models, by the first word or words of the column `model`."""


@dataclass(frozen=True, eq=False)
class Case:
    """A published row, and what is predicted from.

    Attributes:
        row: The row of the file.
        work: The model.
        layout: The layout.
        device: The device.
        measured: Seconds of a step.
    """

    row: dict[str, str]
    work: ModelWork
    layout: Layout
    device: Hardware
    measured: float

    def seconds(self, reached: Efficiency) -> float:
        """Returns the predicted seconds of a step."""
        return predict(self.work, self.layout, self.device, reached=reached).seconds

    @property
    def known_device(self) -> Hardware:
        """The kind of device whose efficiency the package has."""
        return HARDWARE.get(self.device.kind, hardware("h100"))

    @property
    def source(self) -> str:
        """The short name of the source."""
        return next(name for name in SOURCES if name in self.row["source"])

    @property
    def stack(self) -> str:
        """The release of software that constants of experts are fitted to; "" if it has no name."""
        if self.source != BRIDGE:
            return ""
        release = self.row["table"][:5]
        return next((stack for stack in reversed(STACKS) if stack <= release), STACKS[0])

    @property
    def date(self) -> str:
        """The month that the measurement is of, as far as its source says."""
        if self.source == BRIDGE:
            year, month = self.row["table"].split(".")[:2]
            return f"20{year}-{month}"
        return DATES.get(self.source, "")


def _count(row: dict[str, str], column: str) -> int:
    text = row[column]
    return int(text) if text.isdigit() and int(text) else 1


def _model(row: dict[str, str]) -> ModelWork:
    names = [name for name in MODELS if row["model"].startswith(name)]
    return MODELS[max(names, key=len)]


def _measured(row: dict[str, str]) -> float:
    """Returns the measured seconds of a step."""
    value, devices = float(row["measured"]), int(row["num_devices"])
    if row["unit"] == "s/step":
        return value
    rows = int(row["global_batch"])
    return rows * (int(row["seq"]) if "tokens" in row["unit"] else 1) / devices / value


def _megatron(row: dict[str, str]) -> Case:
    """Megatron in 2022: no communication beside computation, scores of attention in memory."""
    data = _count(row, "dp")
    plain = row["remat"] == "full"
    layout = Layout(
        data=data,
        stage=_count(row, "pp"),
        tensor=_count(row, "tp"),
        chunks=_count(row, "vpp"),
        microbatches=_count(row, "global_batch") // data // _count(row, "micro_batch"),
        rows=_count(row, "micro_batch"),
        sequence=_count(row, "seq"),
        schedule=None if _count(row, "pp") == 1 else "interleaved_1f1b",
        remat="full" if plain else "selective",
        sequence_parallel=not plain,
        order=MEGATRON_ORDER,
        optimizer_bytes=46.0,  # unscaling, norm, Adam and the copy to bfloat16 apart
        overlap=(),
    )
    return Case(row, _model(row), layout, hardware("a100"), _measured(row))


def _layers_per_stage(model: str, num_stages: int) -> tuple[int, ...] | None:
    """Returns what the recipes say of DeepSeek-V3, whose last layer predicts one token more."""
    if not model.startswith("DeepSeek"):
        return None
    more = 0 if "w/o MTP" in model else 1
    layers = {8: (*(8,) * 7, 5 + more), 16: (*(4,) * 15, 1 + more), 32: (1, *(2,) * 30, more)}
    return layers.get(num_stages)


_DTYPES = {"fp8-cs": "fp8", "fp8-cs (fp8-mx)": "fp8", "fp8-mx": "mxfp8"}
"""What releases before 26.02 call dtypes: scales of whole tensors, or of blocks."""


def _megatron_bridge(row: dict[str, str]) -> Case:
    data, tensor, stage = (_count(row, name) for name in ("dp", "tp", "pp"))
    chunks = _count(row, "vpp")
    expert = max(1, _count(row, "ep") // tensor)
    name = row["note"].split(";")[0].lower()
    dtype = _DTYPES.get(name, name)
    rows = _count(row, "micro_batch")
    fsdp = row["fsdp"] not in ("", "0")
    # The recipes of nvfp4 do not run the communication of tensor parallelism beside products.
    kinds = ["gradient_reduction", "point_to_point", "context", "fsdp"]
    kinds += [] if dtype == "nvfp4" else ["tensor"]
    layout = Layout(
        data=1 if fsdp else data // expert,
        fsdp=data if fsdp else 1,
        expert=expert,
        stage=stage,
        tensor=tensor,
        context=_count(row, "cp"),
        chunks=chunks,
        microbatches=_count(row, "global_batch") // data // rows,
        rows=rows,
        sequence=_count(row, "seq"),
        schedule=None if stage == 1 else "interleaved_1f1b" if chunks > 1 else "1f1b",
        gather="layer",
        order=MEGATRON_ORDER,
        dtype=dtype,
        experts_over_tensor=tensor > 1,
        layers_per_stage=_layers_per_stage(row["model"], stage * chunks),
        deduplicate_experts=True,
        overlap=tuple(kinds),
    )
    device = hardware(row["hardware"].removeprefix("DGX-").lower())
    return Case(row, _model(row), layout, device, _measured(row))


def _torchtitan(row: dict[str, str]) -> Case:
    """H100s with slower memory; as many microbatches as ranks, torchtitan's default."""
    stage, fsdp, context = (_count(row, name) for name in ("pp", "fsdp", "cp"))
    local = _count(row, "global_batch") // fsdp
    # Without a pipeline all rows are one microbatch.
    microbatches = stage
    layout = Layout(
        stage=stage,
        fsdp=fsdp,
        tensor=_count(row, "tp"),
        context=context,
        chunks=_count(row, "vpp"),
        microbatches=microbatches,
        rows=local // microbatches,
        sequence=_count(row, "seq"),
        schedule={"1f1b": "1f1b", "interleaved 1f1b": "interleaved_1f1b"}.get(
            row["schedule"].lower()
        ),
        remat="selective" if row["remat"] == "selective" else "full",
        gather="layer",
        order=MEGATRON_ORDER,
        dtype="bf16" if "BF16" in row["note"] else "fp8",
        overlap=("tensor", "fsdp", "gradient_reduction"),
    )
    # The GPUs of that report have slower memory and 500 W.
    device = replace(hardware("h100"), kind="h100-500w", memory_bandwidth=2.4e12)
    return Case(row, _model(row), layout, device, _measured(row))


class Recipe(NamedTuple):
    """What a recipe of MaxText computes again in a backward, by the tensors that it keeps.

    Attributes:
        recomputed: The fraction of a forward; without the last product, which no backward reads.
        attention: The fraction of the kernel of attention: 0 if its result is kept.
        backward_products: 5 with `sa_use_fused_bwd_kernel`, otherwise 7.
        context: Devices that divide each sequence.
    """

    recomputed: float
    attention: float = 1.0
    backward_products: int = 7
    context: int = 1


_RECIPES = {
    # The output of attention and of the MLP.
    ("llama3.1-405b", "v5p", "8192"): Recipe(0.64, attention=0.0),
    # The layer's input.
    ("llama3.1-405b", "v6e", "8192"): Recipe(1.0),
    # The layer's input and what attention's last product returns.
    ("deepseek3-671b", "v5p", "4096"): Recipe(1.0),
    ("gpt3-175b", "v5p", "2048"): Recipe(1.0),
    ("gpt3-175b", "v6e", "2048"): Recipe(1.0),
    # The layer's input, queries, keys and values.
    ("llama3.1-70b", "v6e", "8192"): Recipe(0.63, backward_products=5),
    # These, and what attention's last product returns.
    ("llama3.1-8b", "v6e", "8192"): Recipe(0.54, backward_products=5),
    # The layer's input, queries, keys, values and the output of attention.
    ("llama3.1-70b", "tpu7x", "8192"): Recipe(0.63, attention=0.0, backward_products=5),
    # These, and the output of the MLP.
    ("llama3.1-70b", "tpu7x", "131072"): Recipe(0.63, 0.0, 5, context=8),
}
"""By model, chip and length of a sequence: AI-Hypercomputer/tpu-recipes at c8cfe2f, and the
configurations that it names in benchmarks/ of AI-Hypercomputer/maxtext at e591f30c."""


def _maxtext(row: dict[str, str]) -> Case:
    chip = next(k for k in ("v6e", "v5p", "tpu7x") if k in row["hardware"].lower())
    device = HARDWARE[chip]
    recipe = _RECIPES[row["model"], chip, row["seq"]]
    devices = int(row["num_devices"]) * device.devices_per_chip
    layout = Layout(
        fsdp=devices // recipe.context,
        context=recipe.context,
        rows=int(row["global_batch"]) * recipe.context // devices,
        sequence=int(row["seq"]),
        recomputed=recipe.recomputed,
        recomputed_attention=recipe.attention,
        hosts=2 if row["hardware"].startswith("2 x") else 0,
        gather="layer",
        context_gathers=True,
        dtype="int8" if "int8" in row["note"] else "bf16",
        overlap=("fsdp", "tensor"),
    )
    if row["model"] == "gpt3-175b" and device.kind == "v5p":
        layout = replace(layout, fsdp=devices // 8, tensor=8, rows=8 * layout.rows)
    work = _with_backward(_model(row), recipe.backward_products)
    return Case(row, work, layout, device, _measured(row))


def _with_backward(work: ModelWork, products: int) -> ModelWork:
    """Returns the work with a kernel of attention that has as many products in its backward."""
    layers = []
    for layer in work.layers:
        assert layer.attention is not None
        attention = replace(layer.attention, backward_products=products)
        layers.append(replace(layer, attention=attention))
    return replace(work, layers=tuple(layers))


_MAXTEXT_TABLES: dict[tuple[str, int], tuple[int, int, Remat]] = {
    ("v5e", 16): (6, 1, "full"),
    ("v5e", 32): (4, 1, "full"),
    ("v5e", 64): (2, 1, "full"),
    ("v5e", 128): (1, 16, "none"),
    ("v5p", 32): (7, 4, "selective"),
    ("v5p", 64): (3, 4, "selective"),
    ("v5p", 128): (1, 8, "selective"),
    ("v5p", 256): (1, 8, "selective"),
    ("v5p", 512): (2, 8, "full"),
}
"""Rows per device, tensor parallelism and rematerialization of the scripts beside the tables."""


def _maxtext_table(row: dict[str, str]) -> Case:
    """Returns a row of MaxText's tables, whose models are 16 to 512 times the smallest.

    The rates of the tables count all of the square of attention. Slices have replicas.
    """
    scale, slices, kind = int(row["model"]), int(row["slices"]), row["device"]
    rows, tensor, remat = _MAXTEXT_TABLES[kind, scale]
    base, more = divmod(scale.bit_length() - 1, 3)
    wide = base + (more > 0)
    work = transformer(
        layers=16 << base,
        hidden=2048 << (base + (more > 1)),
        heads=16 << wide,
        head_channels=256,
        mlp=7168 << wide,
        vocab=32000,
        backward_products=7,
    )
    layout = Layout(
        data=slices,
        fsdp=int(row["chips_per_slice"]) // tensor,
        tensor=tensor,
        rows=rows * tensor,
        sequence=2048,
        remat=remat,
        gather="layer",
        hosts=slices if slices > 1 else 0,
        shared_optimizer=False,
        overlap=("fsdp",),
    )
    flops = flops_per_token(work, layout.sequence, whole_square=True) * layout.batch * 2048
    measured = flops / layout.devices / (1e12 * float(row["tflops_per_chip"]))
    shown = {**row, "ep": "", "table": kind, "model": f"MaxText {scale}b"}
    return Case(shown, work, layout, hardware(kind), measured)


def _jax_toolbox(row: dict[str, str]) -> Case:
    """MaxText on eight H100, which keeps what `minimal_flash` names."""
    devices = int(row["num_devices"])
    layout = Layout(
        fsdp=devices,
        rows=int(row["global_batch"]) // devices,
        sequence=int(row["seq"]),
        recomputed=0.14,
        gather="layer",
    )
    return Case(row, _model(row), layout, hardware("h100"), _measured(row))


BRIDGE = "NVIDIA-NeMo/Megatron-Bridge"
TORCHTITAN = "pytorch/torchtitan"
STACKS = ("26.02", "26.04", "26.06")
"""Releases of Megatron-Bridge from which on its experts are faster than before."""
DATES = {
    "arXiv:2205.05198": "2022-05",
    "arXiv:2401.10241": "2023-11",
    TORCHTITAN: "2024-12",
}
"""The months of sources that have one date."""
SOURCES: dict[str, Callable[[dict[str, str]], Case]] = {
    "arXiv:2205.05198": _megatron,
    BRIDGE: _megatron_bridge,
    "NVIDIA/NeMo": _megatron_bridge,
    "NVIDIA/JAX-Toolbox": _jax_toolbox,
    TORCHTITAN: _torchtitan,
    "AI-Hypercomputer/tpu-recipes": _maxtext,
    "AI-Hypercomputer/maxtext": _maxtext_table,
}


def read(name: str) -> list[dict[str, str]]:
    """Returns the rows of a file of published measurements."""
    with (PUBLISHED / name).open() as file:
        return list(csv.DictReader(file))


FITTED = ("throughput.csv", "tpu_v6e.csv")
HELD_BACK = ("not_fitted.csv", "maxtext_tables.csv")
LATER = "throughput_2.csv"


@cache
def cases(files: tuple[str, ...] = FITTED) -> tuple[Case, ...]:
    """Returns the rows of files that are predicted from sizes."""
    rows = (row for name in files for row in read(name) if not left_out(row))
    return tuple(
        make(row) for row in rows for name, make in SOURCES.items() if name in row["source"]
    )


@cache
def fitted_cases() -> tuple[Case, ...]:
    """Returns the rows that constants are fitted to: of later releases, those with experts."""
    later = (case for case in cases((LATER,)) if case.row["table"] in STACKS)
    return cases() + tuple(case for case in later if has_experts(case))


@cache
def later_cases() -> tuple[Case, ...]:
    """Returns the rows of `LATER` that nothing is fitted to."""
    fitted = {id(case) for case in fitted_cases()}
    return tuple(case for case in cases((LATER,)) if id(case) not in fitted)


def has_experts(case: Case) -> bool:
    """Returns whether a model has experts."""
    return any(layer.num_experts for layer in case.work.layers)


_LEFT_OUT: tuple[tuple[dict[str, str], str], ...] = (
    ({"unit": "GiB activations"}, "memory of another program, read off a figure"),
    ({"source": "arXiv:2401.10241"}, "predicted from its profile, below"),
    ({"source": "md@b5bcd76c6", "table": "5"}, "table 5, below"),
    ({"source": "torchtitan issue"}, "neither batch nor length is stated"),
    ({"source": "marin"}, "widths, batch or length are not stated, or the host limits the step"),
    ({"note": "fp8; 464"}, "the chip has no products in fp8, and the recipe's are not described"),
)
"""Rows that are not predicted from sizes: texts in their columns, and the reason."""


def left_out(row: dict[str, str]) -> str:
    """Returns the reason that a row is not predicted from sizes; "" if it is."""
    rows = (why for texts, why in _LEFT_OUT if all(t in row[c] for c, t in texts.items()))
    return next(rows, "") if "unit" in row else ""


def table_5() -> tuple[Case, ...]:
    """Returns torchtitan's rows of 1F1B and of interleaved 1F1B."""
    return tuple(_torchtitan(row) for row in read("torchtitan_table5.csv"))


_ZERO_BUBBLE_SIZES = {"1.5B": (22, 2304, 24), "14.6B": (46, 5120, 40)}  # layers, hidden, heads
_ZERO_BUBBLE_SCHEDULES = {
    "1F1B": ("1f1b", 1),
    "1F1B-I": ("interleaved_1f1b", 3),
    "ZB-1p": ("zero_bubble_h1", 1),
}


@dataclass(frozen=True)
class ProfiledCase:
    """A row of the Zero Bubble paper, predicted from its profile of F, I, W and a transfer.

    Attributes:
        row: The row of the file.
        microbatches: Microbatches of a step.
        measured: Seconds of a step.
        predicted: Seconds of a step.
    """

    row: dict[str, str]
    microbatches: int
    measured: float
    predicted: float


@cache
def profiled_cases(name: str = "throughput.csv") -> list[ProfiledCase]:
    """Returns the rows of the Zero Bubble paper.

    Ranks wait while they send and receive. Zero-bubble schedules have no barrier at the optimizer.
    Few microbatches have no profile: they have that of the fewest which do.
    """
    profiles = {(row["model"], row["m"]): row for row in read("zero_bubble_profile.csv")}
    found = []
    for row in read(name):
        if "2401.10241" not in row["source"]:
            continue
        model = row["model"].split()[1]
        microbatches = int(row["note"].split(";")[0].split()[0].removeprefix("m="))
        least = min(int(m) for of, m in profiles if of == model)
        profile = profiles[model, str(max(microbatches, least))]
        names = ("T_F_ms", "T_B_ms", "T_W_ms", "T_comm_ms")
        times = tuple(float(profile[name]) / 1e3 for name in names)
        family, chunks = _ZERO_BUBBLE_SCHEDULES.get(row["schedule"], (None, 1))
        layout = Layout(
            stage=int(row["pp"]),
            microbatches=microbatches,
            schedule=family or _searched(int(row["pp"]), microbatches, times, model),
            chunks=chunks,
            order=MEGATRON_ORDER,
            optimizer_bytes=46.0,
            overlap=(),
        )
        barrier = not row["schedule"].startswith("ZB") or "sync" in row["schedule"]
        predicted = _profiled_seconds(layout, times, model, barrier)
        found.append(ProfiledCase(row, microbatches, _measured(row), predicted))
    return found


def _searched(ranks: int, microbatches: int, times: tuple[float, ...], model: str) -> Schedule:
    """Returns the best order for twice the memory of 1F1B, as the paper's ZB-2p.

    Bytes of a token are those of the paper's generator: 34 h + 5 a s until I, 32 h until W.
    """
    _, hidden, heads = _ZERO_BUBBLE_SIZES[model]
    memory = ActivationMemory(34 * hidden + 5 * heads * 1024, 32 * hidden)
    cap = 2 * ranks * (34 * hidden + 5 * heads * 1024)
    costs = Costs(times[0], times[1], times[2], times[3])
    return search(
        ranks, microbatches, costs, cap, placement=range(ranks), memory=memory, synchronous=False
    ).schedule


def _profiled_seconds(layout: Layout, times: tuple[float, ...], model: str, barrier: bool) -> float:
    schedule = build_schedule(layout)
    assert schedule is not None
    forward, back, weight, transfer = times
    waits = [count * transfer for count in num_transfers(schedule)]
    stages = StageSeconds(
        tuple(forward / layout.chunks + wait for wait in waits),
        tuple(back / layout.chunks + wait for wait in waits),
        tuple(weight / layout.chunks for _ in waits),
        0.0,
    )
    # What follows the schedule does not depend on it.
    after = predict(_gpt(*_ZERO_BUBBLE_SIZES[model]), layout, hardware("a100")).parts
    time = stages.of(schedule, layout.microbatches, barrier=barrier)
    return time.seconds + after["optimizer"] + after["gradient_reduction"]
