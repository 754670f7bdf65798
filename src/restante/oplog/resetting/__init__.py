"""Empties the op log after a comparison with a peer: the operators' way out of a full disk."""
