"""Chats: conversations whose cache is kept between turns, in memory or on disk."""
