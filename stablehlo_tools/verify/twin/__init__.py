"""Compares programs that are too large to run, at reduced sizes."""

from stablehlo_tools.verify.twin.twin import Twin, estimated_bytes, twins
from stablehlo_tools.verify.twin.twin_verification import TwinVerification, verify_twins

__all__ = ["Twin", "TwinVerification", "estimated_bytes", "twins", "verify_twins"]
