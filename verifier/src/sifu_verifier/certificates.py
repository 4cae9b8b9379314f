"""Certificates of a run, recomputed from its tables (docs/store.md, section 7)."""

from __future__ import annotations

import json

from sifu_verifier.calibration import attacker_rate, multiplier
from sifu_verifier.canonical import Row, sha256
from sifu_verifier.levels import from_initial
from sifu_verifier.releases import check_before_after
from sifu_verifier.run_folder import RunFolder
from sifu_verifier.signatures import is_signed
from sifu_verifier.subjects import first_name_of

CONFIDENTIAL = {"psi", "psi_star", "subjects", "earlier_subjects", "models", "node", "noise_node", "final_node",
                "rounds", "erased_nodes", "remaining_nodes", "solve",
                "delta_reached"}  # fmt: skip

COPIED = ("carried_out", "delta", "epsilon", "final_node", "level", "method", "noise_node", "received",
          "request", "retention")  # fmt: skip


def check_certificates(run: RunFolder, request: Row, body: Row, premises: list[Row]) -> None:
    """Check both certificates of a request against the tables, the recomputed `body` and the recomputed premises."""
    name, sigma, s = request["request"], request["noise_std"], multiplier(request)
    rolled, done = run.rolled[name], run.done[name]
    noised = next(m for m in rolled["payload"]["models"] if m["node"] == request["noise_node"])
    source = noised if request["source_node"] is None else rolled["models"][request["source_node"]]
    recorded = {"source": source, "noised": noised, "final": done["models"][request["final_node"]]}
    models = {f"{which}_model": dict(done["payload"]["certified_models"][which]) for which in recorded}
    for which, row in recorded.items():
        for key in ("node", "digest"):
            run.agree(f"request {name}: {key} of the {which} model", models[f"{which}_model"][key], row[key])
    for m in models.values():
        m["commitment"] = sha256(bytes.fromhex(m["nonce"]), bytes.fromhex(m["digest"]))
    ledger = next(e for e in run.tables["events"] if e["seq"] == done["seq"] - 1)
    body |= {key: request[key] for key in COPIED} | {
        "noise_source": run.noise_source,
        "participation": run.facts["participation"], "versions": json.loads(run.entries["versions"]),
        "run": run.entries["run"], "format": "sifu certificate 1",
        "clients": [first_name_of(run, name) for name in json.loads(request["clients"])],
        "start": "merge" if run.nodes[request["noise_node"]]["kind"] == "merge" else (
            "fresh" if request["source_node"] is None or from_initial(run, request) else "trained"),
        "keeps_statistics": run.spec["keep"]["statistics"] if request["method"] == "closed_form" else None,
        "records": len(json.loads(request["records"])) or None,
        "terms": {key: value for key, value in json.loads(request["terms"]).items()
                  if key not in ("clients", "records")},
        "noise_multiplier": s, "sigma": sigma, "psi_star": sigma / s,
        "node": source["node"], "models": models,
        "commitments": {which: m["commitment"] for which, m in models.items()}
        | ({"records": run.committed[request["request"]]} if request["request"] in run.committed else {}),
        "rounds": run.nodes[request["final_node"]]["position"],
        "ledger": {"head": ledger["hash"].hex(), "seq": ledger["seq"], "time": ledger["time"]},
        "attacker_true_positive_rate_at_1_percent": attacker_rate(request["level"], s),
    }  # fmt: skip
    for form in ("auditor", "public"):
        at, file = f"certificate {name}.{form}", run.folder / "certificates" / f"{name}.{form}.json"
        text = file.read_bytes().decode("utf-8")
        certificate, stored = json.loads(text), {(r["request"], r["form"]): r for r in run.tables["certificates"]}
        run.check(stored.get((name, form), {}).get("content") == text, f"{at}: file and table differ")
        run.agree(f"{at}: hash in the ledger", done["payload"]["certificates"][form], sha256(text.encode()))
        named = [key for seq, key in run.keys if seq < done["seq"]][-1]
        run.agree(f"{at}: public_key", certificate["public_key"], named)
        signed = is_signed(named, certificate.get("signature", ""), certificate["body"])
        named_head = body["ledger"] | {"format": "sifu head 1", "run": run.entries["run"]}
        of_head = certificate["body"]["ledger"].pop("signature", "")
        run.check(signed and is_signed(named, of_head, named_head), f"{at}: the signature does not verify")
        stated = [dict(premise) for premise in certificate["body"]["premises"]]
        confidential = [premise.pop("confidential", None) is not None for premise in stated]
        run.check(set(confidential) == {form == "auditor"}, f"{at}: confidential figures of its premises")
        run.agree(f"{at}: premises", stated, premises)
        times = [row["time"] for row in run.tables["events"] if row["seq"] <= done["seq"]]
        issued = certificate["body"]["issued"]
        run.check(ledger["time"] <= issued <= max(times), f"{at}: issued {issued}, which is not the time of its event")
        hidden = CONFIDENTIAL if form == "public" else set()
        run.check(not hidden & certificate["body"].keys(), f"{at}: holds fields that only the auditor may see")
        check_before_after(run, request, at, certificate["body"].get("before_after"))
        for field, value in (body | {"form": form}).items():
            if field == "delta_reached" and form == "auditor":  # stated with four digits, rounded up
                said = certificate["body"]["delta_reached"]
                good = value * (1 - 1e-6) <= said <= value * 1.002 + 1e-15
                run.check(good, f"{at}: delta_reached is {said}, not {value}")
            elif field not in hidden:
                run.agree(f"{at}: {field}", certificate["body"].get(field), value)
