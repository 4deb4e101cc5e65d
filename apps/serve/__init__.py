"""`oscar-mm serve`: OpenAI's chat-completions protocol over cached conversations."""
