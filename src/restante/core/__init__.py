"""Decisions as plain functions: no clock, no socket, no table."""
