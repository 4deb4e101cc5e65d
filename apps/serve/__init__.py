"""`oscar-mm serve`: OpenAI's chat-completions protocol over kept caches."""
