"""Reads the logs of the peers, and pushes to them."""
