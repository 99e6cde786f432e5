"""What a config decides before anything compiles."""
