"""Who computes what in the next step, within the limits of rows, tokens and blocks."""
