"""Applies the changes of peers: newest wins, and what cannot be applied is parked."""
