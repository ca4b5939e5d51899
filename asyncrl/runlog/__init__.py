"""The records of a run: its directory, metrics, time ledger and batches. Runs everywhere."""
