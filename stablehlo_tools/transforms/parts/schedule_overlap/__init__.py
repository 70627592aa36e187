"""Writes a schedule into a module so that compilers keep it."""
