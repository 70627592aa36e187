"""Whether programs that are compiled apart issue their collectives in one order.

Pure data and pure decisions: what each program issues (`program`), one run of all of them with
blocking rendezvous (`simulation`), the pairs that nothing orders (`hazards`), and the verdict
(`verdict`). Imports no MLIR; `analysis/issued.py` reads a module into this form.
"""
