"""Gives every partition of the op log its indexes, when an operator asks for it."""
