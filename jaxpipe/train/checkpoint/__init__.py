"""Checkpoints: storage, canonical layout, digests and timing."""
