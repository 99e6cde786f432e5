"""The options that some engines have and others do not: one record for all that read them."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


class EngineOptions(NamedTuple):
    """Arguments of `jaxpipe.pipeline` that not all engines have, by the names in `Engine.options`.

    The trainer has their keys in `OPTION_KEYS`, and plans may choose some of them.

    Attributes:
        zero1: Whether gradients, and the state of an optimizer, are divided over `data` too.
        reduce_dtype: The dtype to which one program rounds gradients of layers to sum them over
            `data` and `fsdp`. None: they stay as they are summed over microbatches.
        forwarding_delay: Whether activations are handed over one tick late.
        vocab_parallel: Whether all ranks of one program compute the loss together.
        scan_repeats: Whether repeats run in a `lax.scan`.
        scan_ticks: Whether the ticks of a repeat run in a `lax.scan`.
    """

    zero1: bool = False
    reduce_dtype: Any = None
    forwarding_delay: bool = False
    vocab_parallel: bool = False
    scan_repeats: bool = True
    scan_ticks: bool = True

    @property
    def changed(self) -> dict[str, Any]:
        """Returns the options whose value is not the default, by name."""
        defaults = self._field_defaults
        return {name: x for name, x in self._asdict().items() if x != defaults[name]}


NO_OPTIONS = EngineOptions()
"""Every option at its default."""


def check_reduce_dtype(reduce_dtype: Any) -> np.dtype | None:
    """Checks the dtype to which gradients are rounded.

    Args:
        reduce_dtype: A dtype or its name, or None, as `jaxpipe.pipeline` takes it.

    Returns:
        bfloat16, or None if gradients are not rounded: for float32 and None.

    Raises:
        ValueError: If it is neither float32 nor bfloat16.
    """
    names = ("float32", "bfloat16")
    try:
        name = None if reduce_dtype is None else jnp.dtype(reduce_dtype).name
    except TypeError:
        name = repr(reduce_dtype)
    if name not in (None, *names):
        raise ValueError(f"`reduce_dtype` is {name}. Give {' or '.join(map(repr, names))}.")
    return jnp.dtype(jnp.bfloat16) if name == "bfloat16" else None
