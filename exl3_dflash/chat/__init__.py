"""Conversations with a target and its drafter: the session, its slash commands and the user interfaces."""
