"""The instructions of an MPMD program, and the primitives that mark stages and loops."""
