"""Several processes that compute one model: rank 0 leads, the others do as it says. Knows programs'
weights and heads, never a plan, a row or a request."""
