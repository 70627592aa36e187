"""Hardware profiles: what the shipped ones say, and how each mistake in a user's is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tree import ROOT

from stablehlo_tools.cost.hardware import Hardware, known_hardware, load_hardware
from stablehlo_tools.diagnostics import ToolError

PROFILE = """
name = "toy"
title = "A toy"

[chip]
memory = { value = 2, source = "s" }
memory_bandwidth = { value = 100, source = "s" }
memory_efficiency = { value = 0.5, source = "s" }
launch = { value = 3, source = "s" }
vector = { value = 4, source = "s" }

[chip.matmul]
bf16 = { value = 16, source = "peak of bf16" }

[chip.matmul_model]
efficiency = { value = 0.75, source = "s" }
tile_m = { value = 128, source = "s" }
tile_n = { value = 256, source = "s" }
units = { value = 8, source = "s" }
half_depth = { value = 64, source = "s" }

[[network]]
name = "Wire"
kind = "switch"
devices = { value = 4, source = "s" }
bandwidth = { value = 50, source = "s" }
efficiency = { value = 0.5, source = "s" }
latency = { value = 1.5, source = "s" }
start = { value = 6, source = "s" }
"""


def load(tmp_path: Path, text: str) -> Hardware:
    path = tmp_path / "toy.toml"
    path.write_text(text)
    return load_hardware(str(path))


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(ToolError) as caught:
        load(tmp_path, text)
    rendered = str(caught.value)
    assert rendered.startswith(f"{tmp_path / 'toy.toml'}: error: ")
    return rendered.partition("error: ")[2]


def test_a_profile_is_read_in_bytes_nanoseconds_and_operations(tmp_path: Path):
    toy = load(tmp_path, PROFILE)
    assert (toy.name, toy.title) == ("toy", "A toy")
    assert toy.memory_bytes == 2 * 2**30
    assert toy.memory_bandwidth == 100  # GB/s is bytes/ns
    assert toy.launch_ns == 3000
    assert toy.vector_flops == 4000
    assert toy.matmul_flops == {"bf16": 16000}
    assert (toy.matmul_model.tile_m, toy.matmul_model.half_depth) == (128, 64)
    wire = toy.networks[0]
    assert (wire.devices, wire.latency_ns, wire.start_ns) == (4, 1500, 6000)
    assert toy.sources["chip.matmul.bf16"] == "peak of bf16"
    assert toy.sources["Wire.latency"] == "s"


@pytest.mark.parametrize("name", known_hardware())
def test_every_shipped_figure_has_an_address_or_says_that_it_is_assumed(name: str):
    hardware = load_hardware(name)
    assert hardware.name == name
    for figure, source in hardware.sources.items():
        assert "https://" in source or source.startswith("assumed"), figure


def test_the_shipped_profiles():
    assert known_hardware() == (
        "a100",
        "b200",
        "gb200",
        "h100",
        "h200",
        "mi300x",
        "tpu-v5e",
        "tpu-v5p",
        "tpu-v6e",
        "trainium2",
    )


def test_h200_is_h100_with_other_memory():
    h100, h200 = load_hardware("h100"), load_hardware("h200")
    assert h200.networks == h100.networks
    assert h200.matmul_flops == h100.matmul_flops
    assert h200.memory_bandwidth > h100.memory_bandwidth


@pytest.mark.parametrize(
    ("hardware", "dtype", "like"),
    [
        ("h100", "f8E5M2", "f8E4M3FN"),
        ("a100", "f8E4M3FN", "bf16"),  # no such units: widened
        ("h100", "f4E2M1FN", "f8E4M3FN"),
        ("h100", "i4", "i8"),
        ("tpu-v5e", "ui8", "i8"),
        ("trainium2", "i8", "bf16"),
        ("tpu-v5e", "f16", "bf16"),
    ],
)
def test_a_type_without_a_figure_has_that_of_the_type_it_is_widened_to(
    hardware: str, dtype: str, like: str
):
    device = load_hardware(hardware)
    assert device.peak(dtype) == device.matmul_flops[like]


def test_other_types_are_multiplied_by_the_vector_units():
    tpu = load_hardware("tpu-v5e")
    assert tpu.peak("f64") == tpu.peak("i32") == tpu.vector_flops
    assert load_hardware("h100").peak("f64") == pytest.approx(66.9e3)


def test_a_complex_product_is_four_real_ones():
    h100 = load_hardware("h100")
    assert h100.peak("complex<f32>") == h100.peak("f32") / 4


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('launch = { value = 3, source = "s" }', "", "chip.launch is missing"),
        ("value = 100", "value = -100", "chip.memory_bandwidth is -100, but must be a number"),
        ("value = 100", "value = 0", "chip.memory_bandwidth is 0, but must be a number above 0"),
        ("value = 100", 'value = "fast"', "chip.memory_bandwidth is 'fast', but must be a number"),
        ("value = 100", "value = nan", "chip.memory_bandwidth is nan, but must be a number"),
        ("value = 100", "value = inf", "chip.memory_bandwidth is inf, but must be a number"),
        ("value = 100", "value = true", "chip.memory_bandwidth is True, but must be a number"),
        ("value = 100, ", "", "chip.memory_bandwidth is missing, but must be a number above 0"),
        ("value = 16, source =", "value = 16, sauce =", "bf16.sauce is not known; did you mean"),
        ('"peak of bf16"', '" "', "chip.matmul.bf16 has no source; say where"),
        ('{ value = 16, source = "peak of bf16" }', "16", "matmul.bf16 is 16 without a source"),
        ("bf16", "bf61", "chip.matmul.bf61 is not known; did you mean 'bf16'?"),
        ("bf16", "f16", "chip.matmul.bf16 is missing"),
        ("launch", "lunch", "chip.lunch is not known; did you mean 'launch'?"),
        ("value = 0.75", "value = 1.1", "chip.matmul_model.efficiency is 1.1, but must be a share"),
        ("value = 128", "value = 128.5", "chip.matmul_model.tile_m is 128.5, but must be a whole"),
        ("value = 8", "value = 0", "chip.matmul_model.units is 0, but must be a whole number"),
        ("value = 1.5", "value = -1.5", "Wire.latency is -1.5, but must be a number of 0 or more"),
        ('"switch"', '"ring"', "Wire.kind is 'ring', but must be 'switch' or 'torus'"),
        ('"switch"', '"torus"', "Wire.dimensions is missing"),
        ('name = "Wire"', "", "network[0].name is missing, but must be a string"),
        ("[[network]]", "[network]", "networks must be tables, each under [[network]]"),
        ("[[network]]", "[[net]]", "net is not known; did you mean 'network'?"),
        ('title = "A toy"', "", "title is missing, but must be a string with text"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(tmp_path: Path, old: str, new: str, message: str):
    assert message in refusal(tmp_path, PROFILE.replace(old, new, 1))


def test_a_section_is_a_table(tmp_path: Path):
    text = PROFILE.partition("[chip]")[0] + "chip = 3"
    assert "[chip] must be a table, not 3" in refusal(tmp_path, text)


def test_a_profile_without_a_network_is_refused(tmp_path: Path):
    assert "no [[network]]" in refusal(tmp_path, PROFILE.partition("[[network]]")[0])


def test_networks_have_names_of_their_own(tmp_path: Path):
    _, _, network = PROFILE.partition("[[network]]")
    outer = network.replace("devices = { value = 4", "devices = { value = 8")
    text = PROFILE + "[[network]]" + outer
    assert "two networks are called 'Wire'" in refusal(tmp_path, text)


def test_a_network_inside_of_one_that_reaches_no_further_is_refused(tmp_path: Path):
    _, _, network = PROFILE.partition("[[network]]")
    text = PROFILE + "[[network]]" + network.replace("Wire", "Cable")
    expected = "network 'Cable' must reach more devices than 'Wire' inside it"
    assert expected in refusal(tmp_path, text)


TORUS = """[[network]]
name = "Links"
kind = "torus"
devices = { value = 16, source = "s" }
bandwidth = { value = 50, source = "s" }
efficiency = { value = 0.5, source = "s" }
latency = { value = 1.5, source = "s" }
start = { value = 6, source = "s" }
dimensions = { value = 2, source = "s" }
wraps_from = { value = 4, source = "s" }
"""


def test_a_torus_is_innermost_and_has_up_to_three_dimensions(tmp_path: Path):
    chip = PROFILE.partition("[[network]]")[0]
    assert load(tmp_path, chip + TORUS).networks[0].wraps_from == 4
    assert "'Links' is a torus; only the innermost" in refusal(tmp_path, PROFILE + TORUS)
    four = chip + TORUS.replace("value = 2", "value = 4")
    assert "Links.dimensions is 4, but must be 1, 2 or 3" in refusal(tmp_path, four)


def test_what_is_not_toml_is_refused(tmp_path: Path):
    assert "not TOML: " in refusal(tmp_path, "name = ")
    (tmp_path / "toy.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ToolError, match="not UTF-8"):
        load_hardware(str(tmp_path / "toy.toml"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ToolError, match=re.escape(f"{tmp_path}/none.toml: error: cannot read")):
        load_hardware(f"{tmp_path}/none.toml")


def test_an_unknown_device_lists_the_known_ones():
    with pytest.raises(ToolError, match=r"'H100x'; did you mean 'h100'\? known: a100, b200, gb200"):
        load_hardware("H100x")


def test_a_profile_extends_another_by_the_figures_that_differ(tmp_path: Path):
    cloud = load(
        tmp_path,
        """
        extends = "h100"
        name = "cloud"
        [chip]
        memory = { value = 94, source = "s" }
        [[network]]
        name = "InfiniBand"
        bandwidth = { value = 25, source = "s" }
        """,
    )
    h100 = load_hardware("h100")
    assert cloud.name == "cloud"
    assert cloud.memory_bytes == 94 * 2**30
    assert cloud.memory_bandwidth == h100.memory_bandwidth
    assert [network.bandwidth for network in cloud.networks] == [450, 25]
    assert cloud.networks[1].latency_ns == h100.networks[1].latency_ns


def test_a_network_of_another_name_is_outermost(tmp_path: Path):
    _, _, network = PROFILE.partition("[[network]]")
    (tmp_path / "base.toml").write_text(PROFILE)
    outer = network.replace("Wire", "Cable").replace(
        "devices = { value = 4", "devices = { value = 8"
    )
    both = load(tmp_path, 'extends = "base.toml"\n[[network]]' + outer)
    assert [network.name for network in both.networks] == ["Wire", "Cable"]


def test_an_unknown_base_and_a_circle_are_refused(tmp_path: Path):
    assert "no hardware profile 'h1000'" in refusal(tmp_path, 'extends = "h1000"')
    assert "extends itself through " in refusal(tmp_path, 'extends = "./toy.toml"')


@pytest.mark.parametrize("name", known_hardware())
def test_the_page_has_the_figures_of_every_profile(name: str):
    page = ROOT / "docs" / "concepts" / "cost.md"
    row = next(line for line in page.read_text().splitlines() if line.startswith(f"| `{name}`"))
    _, title, peak, memory, networks = (cell.strip() for cell in row.strip("| ").split("|"))
    device = load_hardware(name)
    assert device.title.startswith(title)
    assert peak == f"{device.peak('bf16') / 1e3:g}"
    assert memory == f"{device.memory_bytes / 2**30:g} GiB, {device.memory_bandwidth:g} GB/s"
    for network, shown in zip(device.networks, networks.split("; "), strict=True):
        assert shown.startswith(network.name)
        assert f" {network.bandwidth:g}" in shown
