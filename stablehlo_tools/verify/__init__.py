"""Same values before and after: random inputs, virtual devices, a bitwise comparison."""

from stablehlo_tools.verify.comparison import Rule
from stablehlo_tools.verify.verification import Options, Verification, verify_artifacts

__all__ = ["Options", "Rule", "Verification", "verify_artifacts"]
