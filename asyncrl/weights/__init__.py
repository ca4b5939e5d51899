"""Models, and transports of weights from the trainer to an engine. Runs at both ends."""
