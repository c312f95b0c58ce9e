"""Measuring the engine: workloads, one run, rooflines, and the record that says it all."""
