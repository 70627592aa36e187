"""Files, whatever is in them: whole or not at all, and JSON with a place for every mistake."""
