"""What a file that is no artifact seems to be, by its first bytes or its first words.

A guess, for messages alone: what is read as an artifact is decided in `parsing`. Sources of the
signatures: the formats' own descriptions (ZIP, RFC 1952, RFC 8878, PNG, PDF, ELF, HDF5,
safetensors, Git LFS).
"""

from __future__ import annotations

import json
import re

_SIGNATURES = (
    (b"PK\x03\x04", "a ZIP archive, such as .npz, .pt or .whl"),
    (b"\x1f\x8b", "a file that gzip has compressed: gunzip it first"),
    (b"\x28\xb5\x2f\xfd", "a file that zstd has compressed: unzstd it first"),
    (b"\x89PNG", "a picture"),
    (b"%PDF", "a PDF"),
    (b"\x7fELF", "a program or a library of this machine"),
    (b"\x89HDF", "an HDF5 file, as Keras writes weights"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"BC\xc0\xde", "LLVM bitcode"),
)
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_SAFETENSORS = re.compile(rb".{5}\x00{3}\{\"", re.DOTALL)
# The first line that says something, comments of MLIR left out.
_TEXTS = (
    (r"version https://git-lfs", "a pointer of Git LFS: git lfs pull gets the file itself"),
    (r"\{ lambda\b", "a printed jaxpr"),
    (r"<(!DOCTYPE|html|\?xml|svg)", "HTML or XML"),
    (r"; ModuleID|target datalayout", "LLVM IR"),
    (r"#!", "a script"),
    (r"(import|from|def|class|async|if|print)\b[^=]*$|\"\"\"|@\w+\s*$", "Python"),
    (r"#{1,6} \S|[-*] \S|={3,}$|-{3,}$|```", "Markdown, or a script"),
    (r"\[[\w.\"-]+\]\s*$|[\w-]+ = \S", "TOML"),
    (r"[\w-]+:(\s|$)", "YAML"),
)
# What MLIR text begins with: an op by its name, or an alias.
_OF_MLIR = re.compile(r'(module\b|[a-z_]\w*\.[a-z_][\w.]*\b|"[\w.]+"\s*\(|[#!][\w.]+\s*=|%|\{-#)')
_MOST = 65_536  # bytes that are looked at


def binary_kind(data: bytes) -> str:
    """What bytes that are no text seem to be; empty where nothing says so."""
    for signature, kind in _SIGNATURES:
        if data.startswith(signature):
            return kind
    if _PICKLE.match(data):
        return "a Python pickle"
    return "a safetensors file: weights, and no program" if _SAFETENSORS.match(data) else ""


def text_kind(text: str) -> str:
    """What text that does not parse as MLIR seems to be; empty where it looks like MLIR."""
    start = text[:_MOST]
    first = next(
        (line.strip() for line in start.splitlines() if line.strip() and not _is_comment(line)), ""
    )
    if _OF_MLIR.match(first):
        return ""
    for pattern, kind in _TEXTS:
        if re.match(pattern, first):
            return kind
    return "JSON" if _is_json(start) else "text, but no MLIR"


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("//")


def _is_json(text: str) -> bool:
    """Whether text begins as JSON does, and goes on as such as far as it was read."""
    if not re.match(r'\s*[\[{]\s*["\[{\]}\d-]', text):
        return False
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return len(text) == _MOST or error.pos > 1
    except RecursionError:
        return True
    return True
