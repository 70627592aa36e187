"""What to do about a program's time and memory: causes, each with a figure and its remedy.

`program` is what every detector asks: the program's tasks in the order a compiler would give them,
and what it would cost otherwise. The detectors are by cause; `advise` has the table of them.
"""
