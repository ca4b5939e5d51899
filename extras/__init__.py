"""Optional systems: a folder or file each. Any of them can be deleted."""
