"""Output parsers: steps that turn the tokens of an answer into its pieces, one file each."""
