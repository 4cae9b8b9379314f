"""Purges of all figures, and the data that must remain of each event and request (docs/store.md, section 6e)."""

from __future__ import annotations

import hashlib
import json
import math

from sifu_verifier.calibration import multiplier
from sifu_verifier.canonical import Row, parsed, sha256
from sifu_verifier.methods import ERASABLE
from sifu_verifier.paths import path_to
from sifu_verifier.run_folder import RunFolder
from sifu_verifier.sealed import kept_path
from sifu_verifier.signatures import is_signed
from sifu_verifier.subjects import indices_of

# Section 6e: kinds of events whose payloads lose keys in a purge of all figures, and these keys.
WITH_FIGURES = ("rounds", "evaluation", "rolled back", "request planned", "request done", "restored", "purged")

FIGURES = {"dropped_models", "dropped_updates", "remaining_models", "source_model", "certified_models", "bytes_kept",
           "source_node", "noise_std"}  # fmt: skip


def check_rest(run: RunFolder) -> None:
    """Check events before a purge of all figures: their figures are erased, and the digest is correct (section 6e)."""
    digest, tip = hashlib.sha256(), None
    for event in run.tables["events"][: max(run.wish - 1, 0)]:
        payload, at = parsed(event["payload"]), f"event {event['seq']}"
        if not event["nonce"]:
            digest.update(f"{event['seq']}\0{event['payload']}\0".encode())
            run.check(event["kind"] in WITH_FIGURES, f"{at}: its nonce is missing, and no purge erases it")
        held = FIGURES & payload.keys() if event["kind"] in WITH_FIGURES else set()
        if event["kind"] in WITH_FIGURES:
            first = payload.get("rows", {"first": math.inf})["first"]
            models = [[row["node"] in run.wished["models"], row["node"] >= first, row["kept"]]
                      for row in payload.get("models", [])]  # fmt: skip
            held |= {"models"} if any(model != [True, True, 1] for model in models) else set()
            held |= {"updates"} & payload.keys() if event["kind"] != "rounds" else set()
        choice = payload.get("choice", {"source_node": None})
        if choice["source_node"] is not None:
            hidden = [choice["noise_std"], choice["source_node"], choice["wanted_node"], payload["charges"]]
            held |= set() if hidden == [None, tip, tip, []] else {"choice"}
        run.check(not held, f"{at}: {sorted(held)} were erased and are there again")
        tip = int(payload.get("run", {}).get("tip", -1 if tip is None else tip))
    if run.wish:
        run.agree("what is left of earlier events", run.wished["events"], digest.hexdigest())


def erased_forms(run: RunFolder, request: Row) -> list[str]:
    """Return the certificates of a request that were erased with all figures (section 6e)."""
    if request["request"] not in run.not_recomputed:
        return []
    stays = request["level"] == "exact" or request["sigma"] != "auto"
    return ["auditor"] if stays else ["auditor", "public"]


def check_rest_of_request(run: RunFolder, request: Row) -> None:
    """Check the remaining data of a request with erased figures (section 6e)."""
    name, noise = request["request"], run.nodes[request["noise_node"]]
    chains = [indices_of(run, client) for client in json.loads(request["clients"])]
    own = [clients for i, clients in run.subjects.items() if run.owner[i] is request]
    at = f"request {name}"
    run.agree(f"{at}: subjects", own, chains)
    run.agree(f"{at}: multiplier", request["multiplier"], multiplier(request))
    fresh = request["source_node"] is None
    expected = [request["source_node"], request["request_order"], 0.0 if fresh else math.inf]
    run.agree(f"{at}: noise node", [noise[k] for k in ("parent", "request_order", "noise_std")], expected)
    run.agree(f"{at}: sigma", request["noise_std"], 0.0 if fresh else None)
    charged = [row for row in run.tables["charges"] if row["noise_node"] == noise["node"] and not fresh]
    run.check(not charged, f"{at}: its charges are there again")
    stored = {row["form"]: row["content"] for row in run.tables["certificates"] if row["request"] == name}
    run.agree(f"{at}: certificates", sorted([*stored, *erased_forms(run, request)]), ["auditor", "public"])
    for form, text in stored.items():
        certificate, issued = json.loads(text), run.done[name]["payload"]["certificates"][form]
        run.agree(f"{at}: certificate in the ledger", issued, sha256(text.encode()))
        key = [key for seq, key in run.keys if seq < run.done[name]["seq"]][-1]
        signed = is_signed(key, certificate.get("signature", ""), certificate["body"])
        run.check(signed, f"{at}: the signature of its certificate does not verify")


def check_wish(run: RunFolder, moment: Row) -> None:
    """Check the record of a purge of all figures: verified head, erased data, remaining models (section 6e)."""
    said, at, before = moment["payload"]["all_figures"], f"event {moment['seq']}", run.tables["events"]
    last = before[moment["seq"] - 2]
    served = [name for name, row in moment["requests"].items() if row.get("noise_node") is not None]
    run.agree(f"{at}: what was verified", said["verified"], f"{last['seq']}:{last['hash'].hex()}")
    run.agree(f"{at}: requests", said["requests"], served)
    forms = {name: erased_forms(run, run.requests[name]) for name in served}
    run.agree(f"{at}: certificates", said["certificates"], forms)
    run.check(before[moment["seq"] - 1]["signature"] is not None, f"{at}: it is not signed")
    methods = {run.requests[name]["method"] for name in served}
    promised = all(run.requests[name]["level"] not in (None, "none") for name in served)
    run.check(promised and methods <= ERASABLE, f"{at}: a request was of another kind")
    tied = run.spec["groups"]["count"] or run.spec["model"]["kind"] == "ridge"
    run.check(not tied, f"{at}: the figures of such a run stay")
    active = path_to(run, int(moment["tip"]))
    left = set(moment["models"]) - set(moment["payload"].get("dropped_models", []))
    may = set(kept_path(run, active)) | {active[0], active[-1]}
    good = sorted(left) == said["models"] and active[-1] in left and left <= may
    run.check(good, f"{at}: models {sorted(left)} are left")
    files = sorted(file for (file,) in moment["updates"])
    run.agree(f"{at}: updates purged", moment["payload"].get("dropped_updates", []), files)
