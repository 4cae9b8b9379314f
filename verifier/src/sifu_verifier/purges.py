"""Erasures by purges (docs/store.md, section 5)."""

from __future__ import annotations

import json
import math

from sifu_verifier.erased_figures import check_wish
from sifu_verifier.paths import path_to
from sifu_verifier.psi import psi_along
from sifu_verifier.run_folder import RunFolder
from sifu_verifier.sealed import figures_gone, kept_path


def check_purges(run: RunFolder) -> None:
    """Check that each purge erased exactly the data with influence that no later noise covers (section 5)."""
    for moment in run.purges:
        if moment["seq"] < run.wish:
            continue  # a purge of all figures erased this record (section 6e)
        active, held, at = path_to(run, int(moment["tip"])), set(), f"event {moment['seq']}"
        run.agree(f"{at}: subjects", moment["payload"]["subjects"], moment["known"])
        for i in moment["known"]:
            psi, covered, order = psi_along(run, active, run.subjects[i]), False, run.owner[i]["request_order"]
            for n in active:
                row = run.nodes[n]
                noised = row["kind"] == "initial" or (row["kind"] == "noise" and row["noise_std"] > 0)
                covered = covered or (row["request_order"] >= order and noised)
                held |= {n} if psi[n] > 0 and not covered else set()
        models = [n for n in sorted(moment["models"]) if n in held and n != active[-1]]
        updates = []
        for (file,), row in sorted(moment["updates"].items()):
            node = run.nodes[row["node"]]
            start = node["parent"]
            updates += [file] if start in held else []
        said, wish = moment["payload"], "all_figures" in moment["payload"]
        served = [r for r in moment["requests"].values() if r.get("noise_node") is not None]
        since = [r for r in served if r["request"] not in run.not_recomputed]
        if wish:
            check_wish(run, moment)
        first = json.loads(run.tables["events"][0]["payload"])
        exact = bool(served) and all(
            row.get("level") == "exact" and row["method"] in ("scratch", "groups", "closed_form") for row in since
        )
        exact = exact or wish
        able = "sealed" in first and "reported" not in run.entries
        able = able and exact
        in_the_open = run.spec["local"]["rate"] != "auto" == json.loads(run.entries["asked"])["local"]["rate"]
        able = able and not in_the_open
        run.agree(f"{at}: figures erased", said.get("figures_erased", False), able and "kept_rows" in said)
        if said.get("figures_erased"):
            stays = kept_path(run, active) if wish else active
            cut = [row for n, row in run.nodes.items() if n <= said["kept_rows"]["last"] and n not in stays]
            rounds = [row["node"] for row in cut if row["kind"] in ("round", "merge")]
            back = [node for node in rounds if run.nodes[node]["distance"] or not figures_gone(run, node)]
            noised = [row for row in cut if row["kind"] == "noise"]
            back += [row["node"] for row in noised if [row["parent"], row["noise_std"], row["rounding"]]
                     != [row["node"] - 1, math.inf, math.inf]]  # fmt: skip
            gone = {c for i in moment["known"] for c in run.subjects[i]}
            back += [c for c in gone if run.clients[c]["smoothness"] is not None]
            run.check(not back, f"{at}: figures of {back} are there again")
            rates = [first for first in run.rates if first <= said["kept_rows"]["last"]]
            run.check(len(rates) <= 1, f"{at}: local rates of {rates} are there again")
        if not wish:
            run.agree(f"{at}: models purged", moment["payload"].get("dropped_models", []), models)
            run.agree(f"{at}: updates purged", moment["payload"].get("dropped_updates", []), updates)
