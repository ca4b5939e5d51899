"""The real controller over a virtual cluster and clock."""
