"""Optional systems: a folder or file each, which may be deleted."""
