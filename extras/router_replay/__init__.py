"""Router replay: the trainer's routers take the experts that the engine's took."""
