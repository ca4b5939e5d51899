"""Records, messages, tasks, environments, reward functions, the tiny models. Runs everywhere, and starts no process."""
