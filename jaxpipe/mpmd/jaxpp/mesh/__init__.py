"""The name of `jaxpp.mesh`."""

from ...api import MpmdMesh as MpmdMesh
