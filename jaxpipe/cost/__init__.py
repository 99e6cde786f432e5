"""Predicts the time of a training step from sizes, a layout and a kind of device; needs no JAX.

`devices` has what devices and their networks do in a second, `work` what a model computes and
moves per token, and `training_step` the prediction. docs/predictions.md compares it with published
measurements.
"""
