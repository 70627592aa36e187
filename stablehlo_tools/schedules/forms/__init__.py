"""Writes tables out and reads them in: one form a file, none of which loses or adds a cell."""
