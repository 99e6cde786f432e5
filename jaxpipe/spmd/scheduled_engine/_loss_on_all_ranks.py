"""The loss of a microbatch, computed by all ranks together as soon as it leaves the last stage."""

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ...autodiff.staged_model import index_leading
from .._buffers import broadcast
from ..ranks import update_if
from ._phases import ForwardOutputs, ScheduledInvariants, Totals, vocab_parallel_loss
from ._rows import Index, PhaseRow, stage_hint


def loss_on_all_ranks(
    invariants: ScheduledInvariants,
    work: PhaseRow,
    outputs: ForwardOutputs,
    microbatch: Index,
    totals: Totals,
) -> tuple[Totals, ForwardOutputs]:
    """Broadcasts the output of the last stage to all ranks, which compute its loss together.

    The condition is the same on all ranks, so they may communicate under it.
    """
    is_source = (work.microbatch == microbatch) & (work.stage == invariants.num_stages - 1)

    def loss(totals: Totals) -> tuple[Totals, PyTree]:
        everywhere = jax.tree.map(lambda y: broadcast(is_source, y), outputs.activation)
        inputs_m = index_leading(invariants.batch_inputs, microbatch)
        totals, dy = vocab_parallel_loss(invariants, everywhere, inputs_m, totals)
        own = jax.tree.map(lambda *xs: jnp.where(is_source, *xs), dy, outputs.cotangent)
        return totals, own

    totals, cotangent = update_if(
        microbatch >= 0,
        lambda state: loss(state[0]),
        (totals, outputs.cotangent),
        hint=stage_hint(invariants.tables.forward, invariants.num_stages - 1),
    )
    return totals, outputs._replace(cotangent=cotangent)
