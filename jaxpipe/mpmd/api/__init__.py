"""The user interface: meshes, arrays, and compiled functions with pipelined loops."""
