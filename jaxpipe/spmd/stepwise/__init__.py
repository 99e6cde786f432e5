"""Circular pipeline, one iteration per call: the caller writes the loop."""
