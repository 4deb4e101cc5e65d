"""Chats: what they hold between turns, where it is, and how a turn is made."""
