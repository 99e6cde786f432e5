"""Reads the settings of a training run: keys, files, and checks across keys."""
