"""The pages that are generated from the code say what the code says."""

from pathlib import Path

import pytest

from docs import generate


def test_pass_reference_is_up_to_date(capsys: pytest.CaptureFixture[str]):
    status = generate.main(["--check"])
    assert status == 0, capsys.readouterr().err


def test_stale_page_is_found_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "passes.md"
    monkeypatch.setattr(generate, "PAGE", page)
    page.write_text(generate.page().replace("`barrier`", "`barriers`"))
    assert generate.main(["--check"]) == 1
    told = capsys.readouterr().err
    assert "-| `form` | `barriers` or `composite` |" in told
    assert "+| `form` | `barrier` or `composite` |" in told
    assert "run `make docs`" in told
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0


def test_missing_page_is_out_of_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generate, "PAGE", tmp_path / "passes.md")
    assert generate.main(["--check"]) == 1
