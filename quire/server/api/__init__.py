"""The APIs: OpenAI's and Anthropic's over one way to run a generation."""
