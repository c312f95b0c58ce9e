"""Training of a small image model."""
