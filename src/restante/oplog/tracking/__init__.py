"""Tracked tables: which can be, and the triggers that capture their changes."""
