"""Runs an engine: the loop of steps, where it runs, and what it records."""
