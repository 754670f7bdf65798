"""Compares tracked tables with those of a peer, and repairs them."""
