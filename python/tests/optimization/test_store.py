"""What is kept from run to run, and what becomes of it when files are damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from stablehlo_tools.optimization import store as stores
from stablehlo_tools.optimization.store import AnswerStore


def test_answers_are_found_by_all_of_their_question(tmp_path: Path):
    store = AnswerStore(tmp_path)
    store.keep({"n": 1}, "a", [1, 2.5, None])
    assert store.answer("a", [1, 2.5, None]) == {"n": 1}
    assert store.answer("a", [1, 2.5]) is None
    assert AnswerStore(tmp_path).answer("a", [1, 2.5, None]) == {"n": 1}


def test_a_damaged_answer_counts_as_none(tmp_path: Path):
    store = AnswerStore(tmp_path)
    store.keep({"n": 1}, "a")
    (kept,) = (tmp_path / "answers").iterdir()
    for damaged in (b"", b'{"n": ', b"[1]", b"\xff\x00"):
        kept.write_bytes(damaged)
        assert store.answer("a") is None


def test_a_damaged_blob_counts_as_none(tmp_path: Path):
    store = AnswerStore(tmp_path)
    digest = store.keep_blob(b"module")
    assert store.blob(digest) == b"module"
    store.path(digest).write_bytes(b"modulf")
    assert store.blob(digest) is None


def test_another_version_of_the_tool_asks_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = AnswerStore(tmp_path)
    store.keep({"n": 1}, "a")
    monkeypatch.setattr(stores, "tool_digest", lambda: "another")
    assert store.answer("a") is None


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import os

    store = AnswerStore(tmp_path)
    digests = [store.keep_blob(bytes([n]) * 100) for n in range(4)]
    for age, digest in enumerate(reversed(digests)):
        os.utime(store.path(digest), (1000.0 - age, 1000.0 - age))
    store.blob(digests[0])  # used now
    monkeypatch.setattr(stores, "_MOST_BYTES", 250)
    store.prune()
    assert [store.has(digest) for digest in digests] == [True, False, False, True]


def test_where_nothing_can_be_written_is_known(tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert stores.is_writable(tmp_path / "a" / "b")
    assert not stores.is_writable(tmp_path / "file" / "a")
    assert not stores.is_writable(Path("/proc/cache"))


def test_a_directory_that_cannot_be_written_keeps_nothing(tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    store = AnswerStore(blocked)
    store.keep({"n": 1}, "a")
    assert store.answer("a") is None
