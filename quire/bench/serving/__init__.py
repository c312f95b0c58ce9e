"""Measuring a server over HTTP: what is asked, when, what was seen, and how it is told.
Loads no model and imports no torch."""
