"""Who may use how much: tenants, admission, rates, storage and the cost of a request."""
