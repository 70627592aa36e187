"""Where things lie in this repository."""

from pathlib import Path

ROOT = Path(__file__).parents[3]
LIT_TESTS = ROOT / "lit_tests"
BENCHMARKS = ROOT / "python" / "benchmarks"
FIXTURES = ROOT / "python" / "tests" / "fixtures"
SOAK = ROOT / "python" / "soak"
SUPPORT = Path(__file__).parent
