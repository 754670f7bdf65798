"""Drops ops that nobody needs any more, and those that nobody may wait for any longer."""
