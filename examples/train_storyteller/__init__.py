"""Training of quire-storyteller, the small model that ships in the package: data, tokenizer,
training, export."""
