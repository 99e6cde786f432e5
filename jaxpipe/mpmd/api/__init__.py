"""The user interface: meshes, arrays, and compiled functions with pipelined loops."""

from ._jit import sharding_in_group as sharding_in_group
