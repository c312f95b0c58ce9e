"""Questions about a text, answered by the probabilities of their options: no text is generated."""
