"""What users call: meshes, arrays, and functions with pipelined loops."""
