"""Drafting by a model, in the worker: its keys and values, its vocabulary, how far it goes."""
