"""The HTTP server: OpenAI's and Anthropic's APIs over an engine. Imports no torch;
the engine lives behind its client."""
