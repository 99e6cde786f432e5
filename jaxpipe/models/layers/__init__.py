"""Layers that models share: attention, experts, projections, norms."""
