"""From a plan to an engine: finds the model's files, loads weights,
makes executor and scheduler."""
