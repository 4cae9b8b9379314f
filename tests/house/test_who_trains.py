"""Tests that train a run themselves: the list only shrinks, because finished runs (tests/runs.py) are there already."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
MAY_TRAIN: dict[str, str] = {
    "api": "test_backups_and_keys test_closed_form_runs test_data_that_is_gone test_data_warnings "
    "test_exported_kinds test_exported_models test_exports_are_the_model test_foreign_engines test_frames "
    "test_held_out test_honest_levels test_joining test_module_is_pure test_no_claim_beyond_the_truth "
    "test_own_models test_record_premises test_requests_from_files",
    "audit": "designed_runs test_audit_attacks test_audit_claims test_before_after test_exact_audits",
    "cli": "test_bad_input test_cli_output test_cli_running test_nothing_lost test_odd_files test_own_tables "
    "test_true_sentences",
    "core": "test_capabilities test_observers",
    "data": "test_data_dataset test_data_table test_deep_features test_feature_modules test_frozen_features "
    "test_held_out_rows test_regression_tables test_transformer_features",
    "docs": "test_dpo_page",
    "engines/flower": "test_flower_checkpoints test_flower_closed_form test_flower_groups test_flower_stragglers",
    "engines/gpu": "test_graph_engine test_run_devices",
    "engines/sim": "test_heads_on_device test_sim_agreement test_sim_drifts test_trainers test_whole_batches",
    "guards": "guards test_guards",
    "house": "test_without_torch",
    "methods": "test_groups_method",
    ".": "adapters random_journeys random_runs release_journeys runs test_conformance",
    "planning": "test_auto_method test_noise_planning",
    "report": "conftest test_report_page",
    "requests": "test_approvals test_erasure test_every_name_of_a_client test_everyone_gone_counts "
    "test_faults_after_rollback test_interrupted_requests test_lookalikes test_names_and_orders "
    "test_names_people_read test_one_client_left test_plans_of_waiting_requests test_record_commitments "
    "test_records test_request_record test_same_data test_settled_requests test_who_is_in_a_release",
    "run": "test_release_accounting test_release_exits test_release_noise_runs test_run_semantics",
    "server": "test_loop_heads",
    "store": "test_hostile_clients test_interrupts test_other_databases test_strange_files",
    "theory": "test_linear_regression_appendix test_own_steps test_psi_dominates test_request_sequences",
    "verify": "test_certificate_alone test_found_by_random_requests test_group_tampering "
    "test_kept_heads test_levels_agree test_purges_between_requests "
    "test_regularity_agrees test_seen_heads test_signed_contradictions test_unrecorded_files",
}
"""Files by folder that contain a call to `train`. A file that no longer needs one leaves the list; none joins it."""
MOST = 353
"""Number of functions that call `train`, tests, fixtures and helpers alike. It may only fall."""


def trainers() -> Iterator[Path]:
    """Yield the file of every function that calls `train` with arguments, or passes "train" to a function."""
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for function in ast.walk(ast.parse(text)) if "train(" in text or '"train"' in text else ():
            if isinstance(function, ast.FunctionDef) and any(map(_trains, ast.walk(function))):
                yield path.relative_to(TESTS)


def _trains(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = getattr(node.func, "attr", getattr(node.func, "id", ""))
    command = any(isinstance(argument, ast.Constant) and argument.value == "train" for argument in node.args)
    return command or (called == "train" and bool(node.args or node.keywords))


def test_only_listed_files_train() -> None:
    allowed = {Path(folder, f"{name}.py") for folder, names in MAY_TRAIN.items() for name in names.split()}
    found = list(trainers())
    assert set(found) <= allowed
    assert len(found) <= MOST
