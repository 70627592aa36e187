"""HLO text as an input form: XLA's converter in a child process, then StableHLO alone."""
