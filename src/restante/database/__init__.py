"""What every subject stores with: pool, named queries, locks, partitions and migrations."""
