"""The commands `sifu verify|audit`, which check certified claims."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import sifu
from sifu.cli.options import (
    AllOption,
    HeadsOption,
    OutputOption,
    PublicKeyOption,
    RequestOption,
    RunArgument,
    argument,
    collect_run,
    option,
)
from sifu.cli.output import Answer
from sifu.core.record_commitments import names_record
from sifu.errors import InputError, VerificationError


def verify(
    target: Annotated[
        Path,
        argument(
            "DIR|CERTIFICATE|BUNDLE",
            "A run folder, a certificate, or a bundle.",
            callback=collect_run,
        ),
    ],
    public_key: PublicKeyOption = None,
    heads: HeadsOption = None,
    record: Annotated[
        str | None, option("Record that a certificate must cover: its identity, or its row number.", metavar="X")
    ] = None,
    nonce: Annotated[str, option("With --record: nonce handed out when the request was filed.", metavar="HEX")] = "",
    everything: AllOption = False,
) -> Answer:
    """Recompute the claims of a run or a certificate, offline.

    Exit code 3 if anything is wrong. For a run folder, checks ledger, tables, rounds, models, requests and
    certificates, and names the requests that rest on the signed record. It changes nothing, and can run while another
    command writes. For a certificate file, checks its signature and that its figures agree. For a bundle, also checks
    the chain of events and the succession of keys. A note is not a fault. Only a key or a head kept elsewhere shows
    that the run was not rewritten as a whole. With --record and --nonce, a person checks that a certificate covers
    their record.
    """
    if not target.exists():
        raise InputError(f"{target} does not exist: give a run folder or a certificate file")
    of_run = target.is_dir()
    if (record is None) != (not nonce) or (record is not None and of_run):
        raise InputError("--record and --nonce belong together, and to a certificate")
    result = sifu.verify(target, public_key, heads or ())
    lines, values = result.lines(everything), result.to_mapping()
    if result.holds and public_key is None and not of_run:
        lines.insert(-1, "Compare this key with the one the operator published, or give it with --public-key.")
    holds = result.holds
    if record is not None:
        named = holds and names_record(result.content["body"], record, nonce)
        values |= {"identity": record, "named": named}
        if holds:
            says = "is one of" if named else "with this nonce is none of"
            lines.insert(0, f"Record {record} {says} the forgotten records that {target} names.")
        holds = named

    def fail() -> None:
        raise VerificationError("\n  ".join(lines))

    return Answer(values, *(lines if holds else [fail]), code=0 if holds else 3)


def audit(
    folder: RunArgument,
    request: RequestOption = None,
    attacks: Annotated[bool, option("Also attack the release, and compare it with the one before.")] = True,
    subjects: Annotated[int, option("Maximum number of forgotten clients to replay.", min=1)] = 16,
    replays: Annotated[int, option("Replays of a release with and without the client.", min=20)] = 100_000,
    seed: Annotated[int | None, option("Seed of the audit's own draws, to repeat it.")] = None,
    only_releases: Annotated[
        bool, option("Only compare two releases, as an observer of both could.", "--only-releases")
    ] = False,
    public: Annotated[
        Path | None, option("Samples to compare releases with.", "--public-samples", show_default="held-out rows")
    ] = None,
    trials: Annotated[int, option("Trial deletions to compare, 0 for none.", min=0)] = 50,
    output: OutputOption = None,
) -> Answer:
    """Attack the certified claims.

    Exit code 3 if any of them is contradicted; audit.json is in DIR/audit by default. Replays the run with and without
    the forgotten clients (all data must be available), compares true distances with Psi and noise with its record,
    bounds epsilon from below by replaying releases, and attacks the released model. It also compares releases before
    and after a deletion, which no certificate covers.
    """
    from sifu.audit import AuditOptions, audit_run
    from sifu.cli.audit import AuditProgress, show_audit

    options = AuditOptions(
        subjects,
        replays,
        attacks=attacks,
        request=request,
        seed=seed,
        public=public,
        trials=trials,
        only_before_after=only_releases,
    )
    with AuditProgress() as progress:
        report = audit_run(sifu.open_run(folder), options, progress=progress)
    return show_audit(report, None if only_releases else output or folder / "audit")
