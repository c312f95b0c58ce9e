"""What users call: requests and prompts in, texts and token deltas out."""
