"""Data parallelism: engines of one model, each in a process of its own, behind one front."""
