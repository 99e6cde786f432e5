"""# A gallery of schedules

The schedules of the literature, most of them in the shapes in which their papers draw them. The
colour is the operation, the lightness the chunk of the rank, the number the microbatch, and empty
space the bubble. `jaxpipe.schedules` needs no JAX and no devices.
"""

# %%
from jaxpipe.schedules import (
    FAMILIES,
    Costs,
    bubble_fraction,
    build,
    check,
    parse,
    peak_activations,
    simulate,
)
from jaxpipe.schedules.language import num_slices

costs = Costs(forward=1, input=1, weight=1)  # a whole backward is twice a forward


def draw(name, **counts):
    return simulate(build(name, **counts), costs)


# %% [markdown]
# ## GPipe
#
# All forwards, then all backwards ([Huang et al., 2019](https://arxiv.org/abs/1811.06965)). Every
# rank stores all microbatches.

# %%
draw("gpipe", ranks=4, microbatches=4)

# %% [markdown]
# ## 1F1B
#
# A rank runs a backward as soon as one is ready ([Narayanan et al.,
# 2021](https://arxiv.org/abs/2104.04473)). The bubble is that of GPipe; rank 0 stores at most 4
# microbatches and rank 3 one, however many there are.

# %%
draw("1f1b", ranks=4, microbatches=8)

# %% [markdown]
# ## Interleaved 1F1B
#
# Two chunks per rank: half the bubble, twice the transfers (same paper).

# %%
draw("interleaved_1f1b", ranks=4, microbatches=8, chunks=2)

# %% [markdown]
# ## The circular pipeline
#
# MaxText's pipeline: microbatches circulate over a ring of ranks, here twice.

# %%
draw("circular", ranks=4, microbatches=8, chunks=2)

# %% [markdown]
# ## Zero bubble
#
# The backward is split in two: the gradient of the input, `I`, for which the previous stage waits,
# and that of the weights, `W`, for which none does ([Qi et al.,
# 2023](https://arxiv.org/abs/2401.10241)). H1 has the memory of 1F1B and a third of its bubble.

# %%
draw("zero_bubble_h1", ranks=4, microbatches=8)

# %% [markdown]
# H2 stores up to twice as much. It has no bubble but the offsets of the ranks at the start and at
# the end, which the papers do not count.

# %%
draw("zero_bubble_h2", ranks=4, microbatches=8)

# %% [markdown]
# ZB-V gives every rank two chunks, in a V: the first rank has the first and the last stage
# (section 6 of the paper). Its memory is that of 1F1B.

# %%
draw("zbv", ranks=4, microbatches=8)

# %% [markdown]
# ## Less memory
#
# The same V with longer bubbles and less memory: with many ranks about half and a third of that of
# 1F1B ([Qi et al., 2024](https://arxiv.org/abs/2405.15362)).

# %%
draw("v_half", ranks=4, microbatches=8)

# %%
draw("v_min", ranks=4, microbatches=8)

# %% [markdown]
# ## DualPipe
#
# DeepSeek's schedule: microbatches enter at both ends, and a forward and a backward of different
# microbatches overlap as a pair, drawn as two halves ([DeepSeek-V3,
# 2024](https://arxiv.org/abs/2412.19437)). Every stage is on two ranks.

# %%
draw("dualpipe", ranks=4, microbatches=12)

# %% [markdown]
# DualPipeV cuts it in half: one copy of the weights.

# %%
draw("dualpipev", ranks=4, microbatches=10)

# %% [markdown]
# ## Slices of sequences
#
# With causal attention a slice of a sequence can run before the next one is there, so the pipeline
# fills sooner ([Sun et al., 2024](https://arxiv.org/abs/2406.03488)). A letter names the slice.

# %%
draw("seq1f1b", ranks=4, microbatches=4, slices=2)

# %% [markdown]
# ## All of them, in numbers
#
# The share of the time in which even the busiest rank waits, and the most activations that a rank
# stores, in those of a microbatch and a quarter of the layers: an activation of a schedule with
# two chunks per rank counts half, and so does that of half a sequence.

# %%
print(f"{'':23} bubble  stored")
for name in FAMILIES:
    schedule = build(name, ranks=4, microbatches=16)
    stored = max(peak_activations(schedule)) * 4 / schedule.num_stages / num_slices(schedule)
    bubble = bubble_fraction(simulate(schedule, costs))
    print(f"{name:23} {bubble:6.1%}  {stored:6.1f}")

# %% [markdown]
# ## One of your own
#
# A schedule is text: one line per rank. `check` proves that it is complete and cannot deadlock,
# and its error marks the wrong action.

# %%
mine = check(parse("0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2"))
simulate(mine, Costs(forward=10, input=12, weight=8, transfer=2))

# %%
try:
    check(parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B1 1B0"))
except ValueError as error:
    print(error)
