"""Equinox: `model` makes a model for `jaxpipe.pipeline` of a module."""

from ._model import model as model
