"""Endpoints of models that make vectors, classes and scores of texts."""
