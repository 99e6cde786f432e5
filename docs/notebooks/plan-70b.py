"""# Plan a 70B model

How should `llama3.1-70b` be spread over TPUs? The planner compares thousands of layouts by
arithmetic on shapes: it needs no devices, compiles nothing, and answers in seconds on a laptop.
Times are predictions; [Predictions and measurements](../predictions.md) says how far to believe
them.
"""

# %%
import jaxpipe as jp
from jaxpipe.schedules import Costs, build, simulate

MODEL, BATCH, SEQUENCE = "llama3.1-70b", 256, 4096  # a million tokens a step


def show(plans):
    """Prints the tables of an answer, without its head, which says how long planning took."""
    print(str(plans).split("\n\n", 1)[1])


def explain(error):
    """Prints an error, part by part."""
    print(str(error).replace(": ", ":\n").replace(") ", ")\n").replace(". Use", ".\nUse"))


# %% [markdown]
# ## Eight chips are too few
#
# Parameters, gradients and the moments of Adam take 16 bytes per parameter in float32, more than a
# terabyte here. If no layout fits, the error describes the one that needs least.

# %%
try:
    jp.plan(MODEL, "v5p-16", BATCH, SEQUENCE)
except ValueError as error:
    explain(error)

# %% [markdown]
# ## The model fits on sixteen chips
#
# `v5p-32` counts TensorCores: these are 16 chips. There is room, if the backward computes whole layers
# again, or if `tensor` divides what layers store:

# %%
sixteen = jp.plan(MODEL, "v5p-32", BATCH, SEQUENCE, num_plans=3)
show(sixteen)

# %% [markdown]
# The first table is time, the second memory, for the fullest device at the peak of a step.
# `pp` are the ranks of the pipeline, `v` the stages of a rank, `M` the microbatches;
# [Plan a layout](../plan.md) explains every column.
#
# ## Twice the chips, less than half the time
#
# With 32 chips, each computes half as much, and has memory for more of what layers compute: with
# 16, the backward computes all of it again. `max_stages` and keys of a run narrow the search.

# %%
thirty_two = jp.plan(MODEL, "v5p-64", BATCH, SEQUENCE, max_stages=4, ici_tensor_parallelism=2)
show(thirty_two)

# %%
for name, plans in (("16 chips", sixteen), ("32 chips", thirty_two)):
    best = plans.best
    hours = best.time.seconds * plans.request.devices.num_devices / 3600
    print(
        f"{name}: {best.time.seconds:6.1f} s a step, {hours:.2f} chip hours,"
        f" MFU {best.time.mfu:.0%}, remat {best.settings['remat_policy']}"
    )

# %% [markdown]
# ## What does the schedule change?
#
# One mesh with four ranks, under one schedule after the other. Interleaving shortens the
# bubble. Zero bubble schedules split the backward, and what waits for its second half takes memory
# that is not there, or that other choices have to save, at the cost of time.

# %%
FIXED = {"ici_pipeline_parallelism": 4, "ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}


def with_schedule(schedule):
    """Returns a line about the best plan with a schedule."""
    try:
        best = jp.plan(MODEL, "v5p-64", BATCH, SEQUENCE, schedule=schedule, **FIXED).best
    except ValueError as error:
        return str(error).split(" GB too much")[0].split(", ")[-1] + " GB too much"
    time, activations = best.time, best.memory.activations / 1e9
    return f"{time.seconds:5.1f} s, bubble {time.bubble_fraction:.1%}, activations {activations:.1f} GB"


for schedule in ("1f1b", "interleaved_1f1b", "zero_bubble_h1", "zbv"):
    print(f"{schedule:17} {with_schedule(schedule)}")

# %% [markdown]
# Interleaved 1F1B on four ranks with five stages each, here with 8 microbatches so that they can
# be told apart:

# %%
simulate(build("interleaved_1f1b", ranks=4, microbatches=8, chunks=5), Costs(1, 1, 1))

# %% [markdown]
# ## What does memory buy?
#
# The same 32 chips with two ranks, if only a part of their memory may be used: with less of it
# inputs of layers are stored on the host, which is `custom` here, and matrices are cut into more parts,
# which costs communication.

# %%
for gigabytes in (80, 65, 50):
    fixed = {"memory_gb": gigabytes, "ici_pipeline_parallelism": 2, "num_plans": 1}
    best = jp.plan(MODEL, "v5p-64", BATCH, SEQUENCE, schedule="interleaved_1f1b", **fixed).best
    seconds, policy = best.time.seconds, best.settings["remat_policy"]
    mesh = [f"{axis} {best.settings[f'ici_{axis}_parallelism']}" for axis in ("fsdp", "tensor")]
    print(f"{gigabytes} GB: {seconds:.1f} s, {', '.join(mesh)}, {policy}")

# %% [markdown]
# ## Train by it
#
# The settings of a plan, as `jaxpipe plan --write plan.yml` writes them for
# `jaxpipe train plan.yml`. `jaxpipe plan --verify 1` compiles the step with XLA:TPU first, still
# without a chip.

# %%
print(sixteen.yaml())
