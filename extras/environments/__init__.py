"""Environments of several turns: text in, text out, by gymnasium's API."""
