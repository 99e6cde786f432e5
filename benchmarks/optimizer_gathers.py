"""Bytes that the optimizer of a step moves between chips: FSDP beside a pipeline.

    pip install "jaxpipe[train,aot]"
    python benchmarks/optimizer_gathers.py [row ...]

Compiles the real train step of every row for chips that are not there, some minutes each on two
cores. Muon computes with whole matrices. FSDP splits each over chips, so they exchange its parts; a
rank of a pipeline has whole layers. What is counted is the results, on one chip, of the collectives
that XLA puts into the optimizer: those whose place in the program is in its name scope.
"""

import argparse
from typing import NamedTuple

from jaxpipe.models import PRESETS
from jaxpipe.train import load_config, set_up
from jaxpipe.train.step import report_train_step
from jaxpipe.xla import topology_devices
from jaxpipe.xla.hlo import add_up, audit

Settings = dict[str, object]


class Row(NamedTuple):
    """What is compiled: a model, the devices, and how they are used."""

    model: str
    topology: str
    settings: Settings


STEP: Settings = {
    "max_target_length": 2048,
    "remat_policy": "full",
    "dataset_type": "synthetic",
    "optimizer": "muon",
    "compile_default_flags": "quick",
}
BY_LAYER: Settings = {
    "pipeline_engine": "none",
    "num_pipeline_microbatches": 1,
    "per_device_batch_size": 4.0,
}
STAGES: Settings = {
    "pipeline_engine": "circular",
    "ici_pipeline_parallelism": 4,
    "ici_fsdp_parallelism": 1,
    "num_pipeline_microbatches": 16,
    "per_device_batch_size": 4.0,
}
HALF: Settings = {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2}
HALF |= {"num_pipeline_microbatches": 8, "pipeline_fsdp_ag_once": True}
LLAMA, CHIPS = "llama2-7b", "v5p:2x2x1"
# A mixture of 67 billion parameters, of which a token passes 6.
MIXTURE, POD = "qwen3-30b-a3b", "v5p:4x4x4"
EXPERTS: Settings = {
    "base_emb_dim": 2560,
    "base_num_decoder_layers": 64,
    "base_mlp_dim": 1024,
    "base_moe_mlp_dim": 1024,
    "ici_expert_parallelism": 4,
    "per_device_batch_size": 1.0,
}
ROWS = {
    "fsdp 4": Row(LLAMA, CHIPS, BY_LAYER | {"ici_fsdp_parallelism": 4}),
    "stage 2, fsdp 2": Row(LLAMA, CHIPS, STAGES | HALF),
    "stage 4": Row(LLAMA, CHIPS, STAGES),
    "mixture, fsdp 16, expert 4": Row(
        MIXTURE, POD, BY_LAYER | {"ici_fsdp_parallelism": 16} | EXPERTS
    ),
    "mixture, stage 16, expert 4": Row(
        MIXTURE, POD, STAGES | {"ici_pipeline_parallelism": 16} | EXPERTS
    ),
    "fsdp 4, adamw": Row(LLAMA, CHIPS, BY_LAYER | {"optimizer": "adamw"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="bytes that optimizers move between chips")
    parser.add_argument("rows", nargs="*", metavar="row", help=f"of {', '.join(ROWS)}")
    for name in parser.parse_args().rows or ROWS:
        row = ROWS[name]
        pairs = [f"{key}={value}" for key, value in (STEP | row.settings).items()]
        config = load_config([], [f"model_name={row.model}", *pairs], presets=PRESETS)
        plan = set_up(config, topology_devices(row.topology)).step
        report, text = report_train_step(plan)
        sites = [s for s in audit(text).sites if "optimizer" in s.op_name.split("/")]
        print(f"{name}: peak {report.memory.peak_bytes / 1e9:.1f} GB", flush=True)
        for kind in sorted({site.kind for site in sites}):
            total = add_up(tuple(site for site in sites if site.kind == kind))
            print(f"  {kind}: {total.result_bytes / 1e9:.2f} GB in {total.executions}", flush=True)


if __name__ == "__main__":
    main()
