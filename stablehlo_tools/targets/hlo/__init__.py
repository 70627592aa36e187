"""Task graphs of compiled programs, read from scheduled HLO text. Pure Python."""
