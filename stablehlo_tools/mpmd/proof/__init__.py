"""Proves of a set of rank programs that it runs its schedule, and that its values go the right way.

Everything is read back from the IR (`mpmd/reading.py`); the manifest says what it is to be.
"""
