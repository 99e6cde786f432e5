"""Predicts the time of a training step from sizes, a layout and a kind of device; needs no JAX.

`work` has what a model computes and moves per token, and `training_step` the prediction and the
fractions of their peaks that devices reach. docs/predictions.md compares it with published
measurements.
"""
