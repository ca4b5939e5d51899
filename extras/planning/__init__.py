"""AReaL-Hex: what a step costs, and which GPUs do what."""
