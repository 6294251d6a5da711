"""Only the newest coordinator of a run writes; a superseded one never writes again."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsrl.workers.documents import DocumentFile
from rlsrl.workers.leadership import FencedDocument, Leadership, Superseded


def test_a_superseded_coordinator_writes_nothing_and_never_leads_again(tmp_path: Path) -> None:
    names, roster = DocumentFile(tmp_path / "coordinators.json"), DocumentFile(tmp_path / "roster.json")

    def start_coordinator(process: str) -> FencedDocument:
        leadership = Leadership(names, process)
        leadership.acquire()
        return FencedDocument(roster, leadership)

    earlier = start_coordinator("on the node that is cut off")
    earlier.write(b"first")
    later = start_coordinator("elsewhere")
    later.write(b"second")
    with pytest.raises(Superseded, match="elsewhere has taken over from on the node that is cut off"):
        earlier.write(b"late")
    with pytest.raises(Superseded):
        start_coordinator("on the node that is cut off")
    assert earlier.read() == b"second"
    start_coordinator("elsewhere").write(b"third")
    later.write(b"fourth")
    assert roster.read() == b"fourth"
