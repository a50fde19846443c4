"""Outputs beyond one vector of logits: positions, labels, noise, and functions drawn from the posterior."""
