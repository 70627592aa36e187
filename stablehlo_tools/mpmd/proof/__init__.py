"""Proves that a set of rank programs runs its schedule, and that its values reach the right
readers.

The programs are read from the IR alone (`mpmd/reading.py`) and compared with the manifest.
"""
