"""A vocabulary over several ranks."""
