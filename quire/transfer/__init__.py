"""Keys and values on their way between engines: what producers keep, what consumers fetch, and the
connectors between them."""
