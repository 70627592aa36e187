"""Which permutes XLA:TPU lets compute run beside: the rule, and the compiler itself."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from compile_targets import TARGETS

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.cost.emitted_collectives import as_compiled, permute_overlaps
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.cost.transfer_sizes import DeviceTransfer
from stablehlo_tools.targets.chips import Target
from stablehlo_tools.targets.compilation import compile_artifact

type Pairs = list[tuple[int, int]]

ON_TPU = pytest.mark.parametrize(
    "target", [next(each for each in TARGETS if each.values == (Target.TPU,))]
)


def rings(order: list[int], hop: int = 1, groups: int = 8) -> Pairs:
    """Groups of eight of 64 devices, from each place of an order to one further on."""
    return [
        (8 * group + order[place], 8 * group + order[(place + hop) % 8])
        for group in range(groups)
        for place in range(8)
    ]


def flipped(flip: Callable[[int], int]) -> Pairs:
    return [(device, flip(device)) for device in range(64)]


IN_A_LINE, GRAY = list(range(8)), [0, 1, 3, 2, 6, 7, 5, 4]
# As XLA:TPU made them on 64 v5e.
PERMUTES: dict[str, tuple[Pairs, bool]] = {
    "along an axis": (rings(IN_A_LINE), False),
    "two along an axis": (rings(IN_A_LINE, 2), False),
    "halves of an axis": (rings(IN_A_LINE, 4), True),
    "in the order of a Gray code": (rings(GRAY), True),
    "back in the order of a Gray code": (rings(GRAY, 7), True),
    "in another order": (rings([0, 1, 3, 5, 7, 6, 4, 2]), False),
    "neighbours swapped": (flipped(lambda device: device ^ 1), True),
    "rows swapped": (flipped(lambda device: device ^ 8), True),
    "across": (flipped(lambda device: device ^ 9), False),
    "mirrored": (flipped(lambda device: device ^ 7), False),
    "one pair that two bits part": ([(1, 2)], False),
    "round a square": ([(0, 1), (1, 9), (9, 8), (8, 0)], True),
    "to itself": ([(5, 5)], True),
}


@pytest.mark.parametrize("name", PERMUTES)
def test_on_a_large_slice_of_v5e_one_bit_may_change(name: str):
    pairs, overlaps = PERMUTES[name]
    v5e, v6e = load_hardware("tpu-v5e"), load_hardware("tpu-v6e")
    assert permute_overlaps(pairs, v5e, 64) is overlaps
    assert permute_overlaps(pairs, v6e, 64)
    assert permute_overlaps(pairs, load_hardware("h100"), 64)
    transfer = DeviceTransfer("collective_permute", 1e6, tuple(pairs))
    assert as_compiled(transfer, v5e, 64).overlaps is overlaps


def test_on_a_small_slice_any_may():
    pairs = [(place, (place + 1) % 8) for place in range(8)]
    assert permute_overlaps(pairs, load_hardware("tpu-v5e"), 8)
    assert permute_overlaps(pairs, load_hardware("tpu-v5e"), 16)
    assert not permute_overlaps(pairs, load_hardware("tpu-v5e"), 32)


@ON_TPU
def test_the_compiler_does_as_the_rule_says(target: Target):
    """One program of all permutes, each after the one before, beside a product."""
    lines = [
        f"""%p{i} = "stablehlo.collective_permute"(%p{i - 1}) <{{
        channel_handle = #stablehlo.channel_handle<handle = {i}, type = 1>,
        source_target_pairs = dense<{[list(pair) for pair in pairs]}> : tensor<{len(pairs)}x2xi64>
        }}> : (tensor<1280x4096xbf16>) -> tensor<1280x4096xbf16>"""
        for i, (pairs, _) in enumerate(PERMUTES.values(), 1)
    ]
    text = f"""module attributes {{mhlo.num_partitions = 64 : i32, mhlo.num_replicas = 1 : i32}} {{
      func.func public @main(%x: tensor<1280x4096xbf16>, %a: tensor<8192x8192xbf16>)
          -> (tensor<1280x4096xbf16>, tensor<8192x8192xbf16>) {{
        %p0 = stablehlo.negate %x : tensor<1280x4096xbf16>
        {"\n".join(lines)}
        %d = stablehlo.dot_general %a, %a, contracting_dims = [1] x [0]
          : (tensor<8192x8192xbf16>, tensor<8192x8192xbf16>) -> tensor<8192x8192xbf16>
        %q = stablehlo.negate %p{len(lines)} : tensor<1280x4096xbf16>
        return %q, %d : tensor<1280x4096xbf16>, tensor<8192x8192xbf16>
      }}
    }}"""
    hardware = load_hardware("tpu-v5e")
    made = compile_artifact(artifact.parse(text.encode(), "permutes"), target, hardware=hardware)
    found = re.findall(
        r"collective-permute(-start)?\(.*?source_target_pairs=\{(.*?)\}[,}]\s*(?:frontend|metadata|back|$)",
        made.text,
        re.MULTILINE,
    )
    seen = {
        tuple(map(tuple, re.findall(r"\{(\d+),(\d+)", "{" + pairs))): bool(start)
        for start, pairs in found
    }
    for name, (pairs, overlaps) in PERMUTES.items():
        wanted = tuple((str(source), str(to)) for source, to in pairs)
        if name != "to itself":  # which is none
            assert seen[wanted] is overlaps, name
