"""Web demo: a long conversation with a live view of its memory. Requires the extra "demo"."""
