"""Use cases: open a transaction, call core and store, return a result."""
