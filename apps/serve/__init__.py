"""`oscar-mm serve`: OpenAI and Anthropic APIs, with cached conversations."""
