"""Which chip a piece of hardware is compiled as, and how many hosts of it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from compile_targets import TARGETS
from models import collectives as models

from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cli.main import main
from stablehlo_tools.cost.hardware import known_hardware, load_hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.report.exposure import Question, exposure
from stablehlo_tools.targets.chips import CHIPS, Gpu, Target, chip_for, gpu_config
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.topologies import topology

gpu_only = pytest.mark.parametrize("target", TARGETS[1:2])
tpu_only = pytest.mark.parametrize("target", TARGETS[-1:])


def names(chip: str, *devices: int) -> list[str]:
    known = CHIPS[chip]
    return [topology(known.target, count, known).name for count in devices]


def test_a_target_has_a_chip_without_being_told_one() -> None:
    assert topology(Target.CPU, 3).name == "host"
    assert topology(Target.GPU, 8).describe() == "8 H100 (1x1x8)"
    assert topology(Target.TPU, 8).describe() == "8 TPU v5e (v5e:2x4)"


def test_hosts_of_eight_gpus_are_nvlink_domains_of_their_own() -> None:
    assert names("h100", 1, 3, 8) == ["1x1x1", "1x1x3", "1x1x8"]
    assert names("h100", 12, 16, 64) == ["2x1x6", "2x1x8", "8x1x8"]


def test_nvl72_joins_eighteen_hosts_of_four() -> None:
    assert names("gb200", 4, 8, 64, 72) == ["1x1x4", "1x2x4", "1x16x4", "1x18x4"]
    assert names("gb200", 128, 144) == ["2x16x4", "2x18x4"]  # as many of each rack


def test_slices_have_the_shapes_that_are_sold() -> None:
    assert names("tpu-v5e", 1, 2, 8, 256) == ["v5e:1x1", "v5e:1x2", "v5e:2x4", "v5e:16x16"]
    assert names("tpu-v6e", 4, 32) == ["v6e:2x2", "v6e:4x8"]
    assert names("tpu-v5p", 4, 8, 16) == ["v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4"]
    assert names("tpu-v5p", 64, 768) == ["v5p:4x4x4", "v5p:8x8x12"]


@pytest.mark.parametrize(
    ("chip", "devices", "message"),
    [
        ("tpu-v5e", 3, "no TPU v5e slice has 3 chips"),
        (
            "tpu-v6e",
            512,
            "no TPU v6e slice has 512 chips; slices have 1, 2, 4, 8, 16, 32, 64, 128, 256:",
        ),
        (
            "tpu-v5p",
            96,
            "no TPU v5p slice has 96 chips; slices have 1, .*, 4096 and multiples of 64:",
        ),
        ("h100", 5000, "only 1 to 4096"),
    ],
)
def test_there_is_no_such_number_of_devices(chip: str, devices: int, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        names(chip, devices)


@pytest.mark.parametrize("name", known_hardware())
def test_every_shipped_profile_says_what_it_is_compiled_as(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.compile_as is not None
    target = CHIPS[hardware.compile_as].target
    chip, stand_in = chip_for(target, hardware)
    assert chip is CHIPS[hardware.compile_as]
    assert bool(stand_in) == (name not in CHIPS)


def test_a_gpu_is_described_with_its_own_figures() -> None:
    described = {
        name: gpu_config(chip.kind) for name, chip in CHIPS.items() if isinstance(chip.kind, Gpu)
    }
    assert len(set(described.values())) == len(described) == 5
    assert "major: 10 minor: 0 feature_extension: ACCELERATED_FEATURES" in described["b200"]
    assert "major: 8 minor: 0 feature_extension: NONE" in described["a100"]
    assert "shared_memory_per_block_optin: 166912\n" in described["a100"]
    for name in described:  # a driver leaves programs all but a little of the memory
        kind = CHIPS[name].kind
        assert isinstance(kind, Gpu)
        assert 0.97 < kind.memory / load_hardware(name).memory_bytes <= 1.001


@pytest.mark.parametrize(
    ("target", "name", "message"),
    [
        ("gpu", "tpu-v5e", r"XLA:GPU does not compile for tpu-v5e \(Google TPU v5e\): use "),
        ("gpu", "tpu-v5e", r"--target tpu for it, or .*: a100, h100, h200, b200, gb200\n"),
        ("tpu", "mi300x", r"--target gpu for it, or .*: tpu-v5e, tpu-v5p, tpu-v6e\n"),
    ],
)
def test_hardware_of_another_target_is_refused(target: str, name: str, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        compile_artifact(Artifact, target, hardware=load_hardware(name))  # pyright: ignore[reportArgumentType]


def test_a_stand_in_is_named() -> None:
    chip, said = chip_for(Target.GPU, load_hardware("mi300x"))
    assert chip is CHIPS["h200"]
    assert said == "H200 stands in for AMD Instinct MI300X 192 GB"
    _, said = chip_for(Target.CPU, load_hardware("h100"))
    assert said == "XLA:CPU stands in for NVIDIA H100 SXM5 80 GB"


def test_a_profile_of_one_s_own_names_its_chip(tmp_path: Path) -> None:
    profile = tmp_path / "own.toml"
    profile.write_text('extends = "b200"\nname = "own"\ntitle = "Our rack"\n')
    own = load_hardware(str(profile))
    assert chip_for(Target.GPU, own) == (CHIPS["b200"], "B200 stands in for Our rack")
    profile.write_text(profile.read_text() + 'compile_as = "gb200"\n')
    chip, _ = chip_for(Target.GPU, load_hardware(str(profile)))
    assert chip is CHIPS["gb200"]
    chip, said = chip_for(Target.TPU, replace(own, compile_as=None))
    assert chip is CHIPS["tpu-v5e"]
    assert said.startswith(
        "TPU v5e stands in for Our rack; `compile_as` in its profile names another"
    )
    with pytest.raises(ToolError, match="compile_as = 'b20'; known chips: a100"):
        chip_for(Target.GPU, replace(own, compile_as="b20"))
    profile.write_text('extends = "b200"\ncompile_as = 3\n')
    with pytest.raises(ToolError, match="compile_as is 3, but must be a string"):
        load_hardware(str(profile))


@tpu_only
@pytest.mark.parametrize("name", ["tpu-v5p", "tpu-v6e"])
def test_each_generation_of_tpu_compiles(target: Target, name: str) -> None:
    hardware = load_hardware(name)
    question = Question(hardware, (target.value,), with_timeline=False)
    (timed,) = exposure([artifact.from_exported(models.independent())], question)
    assert timed.hardware == hardware.title
    assert f"for 8 {CHIPS[name].title} ({CHIPS[name].title[4:]}:2x" in timed.notes[0]
    assert {row.kind for row in timed.collectives} >= {"all_gather", "collective_permute"}


def test_the_device_that_nobody_named_is_the_target_s_own() -> None:
    by_default = Question(load_hardware("h100"), ("gpu", "tpu"), by_default=True)
    assert by_default.of_target("tpu").hardware.name == "tpu-v5e"
    assert by_default.of_target("gpu") is by_default
    named = replace(by_default, by_default=False)
    assert named.of_target("tpu") is named


@gpu_only
def test_the_command_says_what_stands_in(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = os.fspath(tmp_path / "step.jax_export")
    artifact.save(artifact.from_exported(models.independent()), Path(path))
    words = ["compile", path, "--target", target.value, "--hardware"]
    assert main([*words, "mi300x", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["chip"], answer["topology"]) == ("h200", "1x1x8")
    assert answer["stand_in"] == "H200 stands in for AMD Instinct MI300X 192 GB"
    assert main([*words, "tpu-v5e"]) == 2
    error = capsys.readouterr()
    assert not error.out
    assert "XLA:GPU does not compile for tpu-v5e (Google TPU v5e): use --target tpu" in error.err
