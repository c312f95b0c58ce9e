"""The processes of ranks 1 and above: what starts them, and what they are."""
