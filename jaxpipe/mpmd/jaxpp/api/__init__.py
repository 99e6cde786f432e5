"""The names of `jaxpp.api`, which `jaxpipe.mpmd.jaxpp` has too."""

from .... import __version__ as __version__
from ....compat.jaxpp import *  # noqa: F403
