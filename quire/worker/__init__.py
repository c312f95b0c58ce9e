"""The worker: rows that persist between steps, the inputs of a forward pass,
and the forward pass itself."""
