"""Offers schedules and equations under JaxPP's names."""
