"""A certificate of staleness: trained tokens are scored again under the weights that are stamped on them."""
