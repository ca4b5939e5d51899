"""The model that learns: load, pack, score, step, checkpoint. Runs in every trainer rank."""
