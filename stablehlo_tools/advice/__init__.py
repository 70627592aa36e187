"""Finds causes of a program's cost in time and memory, each with a figure and a remedy.

`advised_program` answers the detectors' questions: the program's tasks in the order of a compiler,
and the cost after a change. Detectors are grouped by cause; `advise` has the table of them.
"""
