"""Checks of the files from which a run resumes, before a process starts: what is lost, or why the run must stop."""

from __future__ import annotations

from rlsrl.api.resolved import CoordinatorConfig
from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.data.version import Version
from rlsrl.local.metrics_log import read_rows_and_damage
from rlsrl.local.run_folder import FRESH, RunFolder
from rlsrl.parameters.resumption import nothing_to_resume, rollback_of
from rlsrl.runtime.ledger import CHAIN, LedgerError, page_path, read_page, read_pages
from rlsrl.workers.coordinator_state import check_documents, check_leases


class NothingToResume(Exception):
    """The run has trained, and no stored version is intact. The text says what to do."""


def check_versions(folder: RunFolder) -> tuple[Version | None, list[str]]:
    """Check the stored versions of a run that has started. Return the version from which its next attempt resumes, or
    None, and which files are damaged and what that costs; record an older version than the newest, too.

    Raises:
        NothingToResume: training would begin from zero.
        OSError: the store cannot be read.
    """
    point = folder.database.resume_point(POLICY_NAME)
    rows, num_damaged = read_rows_and_damage(folder.metrics)
    if point.version is None:
        if point.unusable or rows:
            raise NothingToResume(f"{folder.path}: {nothing_to_resume(point)}")
        return None, []
    lost = []
    if (rollback := rollback_of(point, attempt=folder.record.attempt + 1)) is not None:
        folder.record_rollback(rollback)
        lost.append(str(rollback))
    if num_damaged:
        lost.append(f"{folder.metrics} is damaged: {num_damaged} lines are left out of the learning curve")
    if point.version.step and not rows:
        lost.append(f"{folder.metrics} has no rows: the learning curve begins after step {point.version.step}")
    return point.version, lost


def check_documents_and_pages(folder: RunFolder, config: CoordinatorConfig) -> list[str]:
    """Check the coordinator's documents and the ledger's pages. Return what is lost.

    Raises:
        RunDamaged: a document is damaged, or a lease is missing.
        LedgerError: a ledger page is damaged.
        OSError: a document cannot be read.
    """
    leases, copies = check_documents(config)
    pages = read_pages(folder.ledger)
    for page in pages:
        path = page_path(folder.ledger, page.role, page.index)
        if not path.exists():
            raise LedgerError(
                f"{folder.ledger}: the ledger page of {page.role} {page.index} is in another file than {path.name}; "
                f"{FRESH}"
            )
    check_leases(leases, pages, folder.path / "roster.json")
    paths = {
        page_path(folder.ledger, role, index)
        for role in CHAIN
        for index in range(config.num_workers.get(role, 0))
        if copies.get(role, index) is not None
    }
    return [
        f"{path} is missing or empty: the ledger continues from the coordinator's copy, at most some seconds older"
        for path in sorted(paths)
        if read_page(path) is None
    ]
