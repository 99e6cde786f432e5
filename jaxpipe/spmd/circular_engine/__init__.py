"""MaxText's circular pipeline as pure functions of one rank."""
