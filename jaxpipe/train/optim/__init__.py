"""The optimizer, the learning rate, and which weights decay."""
