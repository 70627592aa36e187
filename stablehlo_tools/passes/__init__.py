"""Defines passes, their options, the text form of pipelines, and the table of passes by name."""
