"""Bounds every table: one planner and one executor; each bounded thing registers a subject."""
