"""The op log: keeps tables on several nodes in step by exchanging their changes."""
