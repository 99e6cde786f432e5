"""JaxPP's names for schedules and equations."""
