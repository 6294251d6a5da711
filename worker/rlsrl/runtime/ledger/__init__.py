"""The ledger: where every transition that was ever produced went, each term counted by its own witness.

    produced = trained + in_buffer + dropped{reason} + lost{receiver_died | producer_died | rolled_back}

Each process writes its own page, a small file that survives its SIGKILL; ``balance`` adds the pages of a run up.
"""

from rlsrl.runtime.ledger.accounts import (
    ACCOUNT_CLOSED,
    ActorLedger,
    BufferLedger,
    ProducerAccount,
    TrainerLedger,
    inherited,
)
from rlsrl.runtime.ledger.balance import CHAIN, Balance, balance, settle_ledger
from rlsrl.runtime.ledger.page import MAX_RECORD_BYTES, LedgerPage, read_page, read_pages
from rlsrl.runtime.ledger.records import (
    DROP_REASONS,
    LOSS_CAUSES,
    Account,
    LedgerError,
    Mark,
    PageRecord,
    Posted,
    ProducerProgress,
)

__all__ = [
    "ACCOUNT_CLOSED",
    "CHAIN",
    "DROP_REASONS",
    "LOSS_CAUSES",
    "MAX_RECORD_BYTES",
    "Account",
    "ActorLedger",
    "Balance",
    "BufferLedger",
    "LedgerError",
    "LedgerPage",
    "Mark",
    "PageRecord",
    "Posted",
    "ProducerAccount",
    "ProducerProgress",
    "TrainerLedger",
    "balance",
    "inherited",
    "read_page",
    "read_pages",
    "settle_ledger",
]
