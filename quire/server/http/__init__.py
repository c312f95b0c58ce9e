"""HTTP itself: connections, the gateway, bodies, errors and responses, whatever the API."""
