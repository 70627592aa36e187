"""Describes the semantics of ops once: tables of names, and functions that read them."""
