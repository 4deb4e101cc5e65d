"""Output parsers: steps that turn an answer's tokens into pieces, one parser per file."""
