"""The name of `jaxpp.experimental`."""

from . import mpmd as mpmd
