"""A sample of a run while it trains, in the layout of its engine."""

from collections.abc import Callable

from jax.sharding import AxisType, Mesh

from ...data import load_tokenizer
from ..checkpoint._canonical import canonical_round_trip
from ..plan._setup import Setup
from ..step._state import TrainState
from ..step._step import stored_shardings
from ._decoding_plan import decoding_plan
from ._prompts import Sample, SamplingOptions, sampler

SampleState = Callable[[TrainState], tuple[Sample, TrainState]]
"""Returns a sample of a state, which it consumes, and the same state."""


def make_sample_state(setup: Setup) -> SampleState | None:
    """Builds the sample of a run, which compiles at its first call; None if the run has none.

    Collective: all processes of a run call the result, as they save a checkpoint. It takes the way
    of one: weights are put into forward order, copied in the dtype of computation, and put back.
    Their bits, and the keys of training, stay what they are.
    """
    config = setup.config
    if not config.sample_prompt:
        return None
    tokenizer = load_tokenizer(config.tokenizer_path, vocab_size=config.vocab_size)
    room = config.max_target_length - len(tokenizer.encode(config.sample_prompt))
    if config.sample_max_tokens > room:
        raise ValueError(
            f"`sample_max_tokens` is {config.sample_max_tokens}, and behind `sample_prompt` a row "
            f"of `max_target_length` = {config.max_target_length} tokens has room for "
            f"{max(room, 0)}. Give fewer, or a shorter prompt."
        )
    # All axes are automatic in the programs that decode, also in a run with explicit ones.
    names = setup.mesh.axis_names
    mesh = Mesh(setup.mesh.devices, names, axis_types=(AxisType.Auto,) * len(names))
    plan = decoding_plan(config, mesh)
    # Every evaluation has the same seed, so that its draws are those of the others.
    options = SamplingOptions(config.sample_max_tokens, config.sample_temperature)
    samples = sampler(plan, tokenizer, [config.sample_prompt], options)
    to_canonical, from_canonical = canonical_round_trip(setup.state, stored_shardings(setup.step))

    def sample_state(state: TrainState) -> tuple[Sample, TrainState]:
        stored = {"weights": state["weights"]}
        canonical = to_canonical(stored)
        [sample] = samples(plan.lay_out(canonical["weights"]))
        return sample, state | from_canonical(stored, canonical)

    return sample_state
