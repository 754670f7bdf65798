"""Serves the log to peers: pages in the order of arrival, and who may read them."""
