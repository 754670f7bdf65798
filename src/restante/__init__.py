"""Restante: files and messages wait for receivers that nobody can call, and then are gone."""

__version__ = "0.1.0"
