"""Builds the state of a training run, and the step that updates it."""
