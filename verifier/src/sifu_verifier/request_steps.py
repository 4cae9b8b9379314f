"""Order of a request's steps, and clients that rejoin after their records were forgotten."""

from __future__ import annotations

import json
import unicodedata

from sifu_verifier.canonical import Row
from sifu_verifier.run_folder import RunFolder

INVISIBLE = ((0xAD, 0xAD), (0x34F, 0x34F), (0x61C, 0x61C), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F),
             (0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F), (0x2800, 0x2800), (0x3164, 0x3164), (0xFE00, 0xFE0F),
             (0xFEFF, 0xFEFF), (0xFFA0, 0xFFA0), (0xFFF0, 0xFFF8), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A),
             (0xE0000, 0xE0FFF))  # fmt: skip

STEPS = {"request received": 1, "request verified": 2, "request planned": 3, "rolled back": 4, "request done": 5,
         "request refused": 6, "request withdrawn": 6}  # fmt: skip


def take_step(run: RunFolder, event: Row, request: str) -> None:
    """Check the order of a request's steps: a refusal or withdrawal precedes its execution (section 6)."""
    before, new = run.steps.get(request, 0), STEPS[event["kind"]]
    good = {
        1: before == 0,
        2: before == 1,
        3: before in (1, 2),
        4: before in (1, 2, 3),
        5: before == 4,
        6: 0 < before < 4,
    }
    run.check(good[new], f"event {event['seq']}: {event['kind']} of {request} is out of order")
    run.steps[request] = new


def take_rejoining(run: RunFolder, event: Row, payload: Row) -> None:
    """Check that a client rejoins once after its records were forgotten, before any round (section 4b)."""
    kind, at = event["kind"], f"event {event['seq']}"
    if kind == "client joined":
        client = int(payload["run"]["client_count"]) - 1
        run.agree(f"{at}: name", run.clients.get(client, {}).get("name"), payload["client"])
        if run.rejoins is not None or "request" in payload:
            run.agree(f"{at}: request of the client that joins again", payload.get("request"), run.rejoins)
            run.rejoined[payload["request"]] = client
        run.rejoins = None
    elif kind == "rolled back" and json.loads(run.requests[payload["request"]]["records"]):
        run.rejoins = payload["request"]
    elif kind in ("request refused", "request withdrawn") and payload["request"] == run.rejoins:
        run.rejoins = None
    elif kind in ("rounds", "request done"):
        run.check(run.rejoins is None, f"{at}: comes before the client of {run.rejoins} joined again")


def person(name: str) -> str:
    """Return the normalised form of a person's name; equal forms denote the same person (section 6)."""
    for _ in range(2):
        name = "".join(sign for sign in unicodedata.normalize("NFKC", name).casefold() if not is_invisible(ord(sign)))
    return " ".join(unicodedata.normalize("NFKC", name).split())


def is_invisible(code: int) -> bool:
    """Return whether a code point is default-ignorable in Unicode, or the blank Braille pattern."""
    return any(first <= code <= last for first, last in INVISIBLE)
