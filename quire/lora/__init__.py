"""Low-rank adapters (LoRA) of a model: their files, their weights, and which row uses which."""
