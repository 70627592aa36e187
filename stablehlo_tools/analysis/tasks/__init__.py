"""Builds task graphs of modules: ops become nodes, nodes kernels, and kernels are timed."""
