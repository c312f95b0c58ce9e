"""GGUF files: the container, and its metadata as the config of a model."""
