"""Manifests of rank sets, changed in one place or as bytes, by a seed."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

DEEP = 100_000
STRANGE: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    10**30,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "finish",
    "0SEND_F0",
    "0F0",
    "999999999SEND_F999999999",
    "../x.mlir",
    "/etc/passwd",
    "rank_0.mlir\x00",
    "rank_0.mlir\n",
    "rank_0.mlir/",
    "C:rank_0.mlir",
    "..",
    "manifest.json",
    "\ud800",
    "\u202egnp.mlir",
    "x" * 100_000,
    "tensor<99999999999x99999999999xf32>",
    "tensor<" * 1000,
    "tensor<?xf32>",
    "tensor<0x4x4xf32>",
    "tensor<f99>",
    [],
    [[]],
    {},
    {"": None},
    [0] * 1000,
]


def mutants(text: str, count: int, seed: int) -> list[bytes]:
    """So many changed manifests."""
    chosen = random.Random(seed)
    return [_mutant(text, chosen) for _ in range(count)]


def _mutant(text: str, chosen: random.Random) -> bytes:
    if chosen.random() < 0.2:
        return _damaged(text.encode(), chosen)
    content = json.loads(text)
    for _ in range(chosen.choice((1, 1, 1, 2, 4))):
        _change(content, chosen)
    return json.dumps(content).encode()


def _change(content: Any, chosen: random.Random) -> None:
    """One change of a value somewhere: each level of the document is as likely as any other."""
    owner, key = content, None
    depth = chosen.randrange(1, 6)
    while True:
        keys = list(owner) if isinstance(owner, dict) else list(range(len(owner)))
        if not keys:
            return
        key = chosen.choice(keys)
        inner = owner[key]
        depth -= 1
        if not depth or not isinstance(inner, dict | list) or not inner:
            break
        owner = inner
    what = chosen.randrange(6)
    if what == 0:
        del owner[key]
    elif what == 1 and isinstance(owner, list):
        owner.insert(chosen.randrange(len(owner) + 1), copy.deepcopy(owner[key]))
    elif what == 2 and isinstance(owner, dict):
        owner[f"{key}x"] = owner[key]
    elif what == 3 and isinstance(owner[key], int | float):
        owner[key] += chosen.choice((-1, 1, 2, -0.5, 10**6))
    elif what == 4 and isinstance(owner, list):
        other = chosen.randrange(len(owner))
        owner[key], owner[other] = owner[other], owner[key]
    else:
        owner[key] = copy.deepcopy(chosen.choice(STRANGE))


def _damaged(data: bytes, chosen: random.Random) -> bytes:
    """A change of the text itself."""
    at = chosen.randrange(len(data))
    what = chosen.randrange(6)
    if what == 0:
        return data[:at]
    if what == 1:
        return data[:at] + bytes([chosen.randrange(256)]) + data[at + 1 :]
    if what == 2:
        return data[:at] + data[at : at + 40] + data[at:]
    if what == 3:
        return data.replace(b"1", b"9" * chosen.choice((20, 400, 5000)), 1)
    opening, closing = chosen.choice(((b"[", b"]"), (b'{"a":', b"}")))
    inner = opening * DEEP + b"1" + (closing * DEEP if what == 4 else b"")
    return data.replace(b'"devices": ', b'"devices": ' + inner + b', "more": ', 1)
