"""Each message on the page of errors is one that the product prints."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
MESSAGE = re.compile(r"^- `([^`]+)`", re.MULTILINE)
JOINT = re.compile(r'"\s*\n\s*f?"')  # between the lines of one message in the source


def test_each_message_is_in_the_source():
    source = "".join(
        JOINT.sub("", path.read_text(encoding="utf-8"))
        for path in (ROOT / "stablehlo_tools").rglob("*.py")
    )
    messages = MESSAGE.findall((ROOT / "docs/reference/errors.md").read_text(encoding="utf-8"))
    assert messages
    parts = [part.strip(" :;,") for message in messages for part in message.split("…")]
    assert [part for part in parts if part not in source] == []
