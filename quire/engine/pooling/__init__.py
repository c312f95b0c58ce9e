"""Vectors, classes and scores of texts: how a model pools, and what can be asked of it."""
