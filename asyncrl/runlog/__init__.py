"""What a run writes: its directory, metrics, time ledger and batches. Runs everywhere."""
