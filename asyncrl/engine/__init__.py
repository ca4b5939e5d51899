"""One vLLM engine, its requests, and the turns, environments and rewards of a trajectory. Runs in rollout workers."""
