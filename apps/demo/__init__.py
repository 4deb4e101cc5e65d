"""The web demo: a long conversation with its memory live. Needs gradio, the extra "demo"."""
