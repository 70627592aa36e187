"""The dimensions that kernels treat independently, and kernels at other sizes.

A kernel is a custom call that runs a program of its own, or a routine of a library. A module for
each kind:

    mosaic.py   `tpu_custom_call`, a Pallas kernel for TPU: read from the kernel itself
    cudnn.py    `__cudnn$fmha…`, attention by cuDNN: its configuration has the sizes
    rules.py    any call with an `sdy.sharding_rule`, from jax or from the file of `--rules`
    table.py    the kind of a call; the rest of the tools ask only this one
"""
