"""OpenAI's API: request and response types, and the endpoints."""
