"""Turns a declaration, weights and a kernel back end into a model that runs."""
