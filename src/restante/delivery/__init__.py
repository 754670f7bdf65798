"""Files: received, fetched, acknowledged, and swept."""
