"""Mixtures of experts: metrics of routers, and a loss that balances experts."""
