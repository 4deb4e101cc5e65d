"""Tool parsers: formats in which models write tool calls, one file each."""
