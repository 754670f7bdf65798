"""HTTP: who is calling, what they ask, and how the answer looks.  Decides nothing by itself."""
