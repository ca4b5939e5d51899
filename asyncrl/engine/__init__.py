"""One vLLM engine, and what one trajectory needs: requests, turns, environments, rewards. Runs in rollout workers."""
