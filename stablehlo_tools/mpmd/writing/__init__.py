"""Writes the program of each rank by a schedule."""
