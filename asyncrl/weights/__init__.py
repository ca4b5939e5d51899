"""How weights get from the trainer to an engine: one transport a file. Runs at both ends."""
