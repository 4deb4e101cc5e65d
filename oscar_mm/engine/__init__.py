"""Generation: a prompt through a model, token by token, to an answer."""
