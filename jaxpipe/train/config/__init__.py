"""Settings of a training run: keys, files, and the checks across keys."""
