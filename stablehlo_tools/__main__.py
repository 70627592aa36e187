"""`python -m stablehlo_tools` is the command line."""

import sys

from stablehlo_tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
