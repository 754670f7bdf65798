"""Receivers: who they are, who may act for them, and calling those that can be called."""
