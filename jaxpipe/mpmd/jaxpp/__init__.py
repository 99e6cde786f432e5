"""`jaxpipe.compat.jaxpp` at the path by which scripts import it."""

from ... import __version__ as __version__
from ...compat.jaxpp import *  # noqa: F403
from . import api as api
from . import mesh as mesh
from . import schedules as schedules
from . import types as types
