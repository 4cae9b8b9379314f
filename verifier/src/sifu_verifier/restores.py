"""Runs restored from a backup."""

from __future__ import annotations

from sifu_verifier.canonical import Row
from sifu_verifier.run_folder import RunFolder


def check_restored(run: RunFolder) -> None:
    """Check that the event of a restore follows the backup's last event."""
    for moment in run.restored:
        before = run.tables["events"][moment["seq"] - 2]
        head = f"{before['seq']}:{before['hash'].hex()}"
        run.agree(f"event {moment['seq']}: head of the backup", moment["payload"]["backup_head"], head)


def restored_before(run: RunFolder, request: Row) -> bool:
    """Return whether the run was restored from a backup before the request was certified."""
    return any(event["seq"] < run.done[request["request"]]["seq"] for event in run.restored)
