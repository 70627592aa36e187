"""Both comparisons of communication overlap: with PyTorch's scheduler, and of the compiled zoo.

    python python/benchmarks/overlap.py [MODEL ...] [--target gpu tpu] [--steps PIPELINE]
                                        [--markdown]

The arguments are those of overlap_compiled.py and say what is compiled; the comparison with
PyTorch takes seconds, and is that of overlap_peers.py.
"""

from __future__ import annotations

import overlap_compiled
import overlap_peers


def main() -> None:
    """Prints the tables of both."""
    overlap_peers.compare_with_pytorch()
    overlap_compiled.main()


if __name__ == "__main__":
    main()
