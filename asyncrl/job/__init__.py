"""Puts the parts of a run together: node, publisher, probe, step log. The only folder that knows both a Policy and a
Controller. Runs in every trainer rank."""
