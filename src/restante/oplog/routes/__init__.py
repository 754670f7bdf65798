"""HTTP routes of the op log: for peers, and for the operator."""
