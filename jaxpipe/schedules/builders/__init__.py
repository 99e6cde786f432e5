"""Builders: one paper family a file, and the registry that names them."""
