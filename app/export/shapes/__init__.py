"""Rows as trainers read them: one file a trainer."""
