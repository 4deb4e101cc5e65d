"""Tool parsers: read the formats in which models write tool calls. Each format has its own file."""
