"""The names of `jaxpp.experimental.mpmd`, with which tasks and transfers are written by hand."""

from .....compat.jaxpp.by_hand import *  # noqa: F403
