"""The ledger: what happened to every transition that was ever produced.

    produced = trained + in_buffer + dropped{reason} + lost{receiver_died | producer_died | rolled_back} + unsettled

``unsettled`` transitions were posted and not taken, and their consumer may still take them. An ended run has none: each
of them was dropped or lost. ``in_buffer`` is 0 then, too, but for a replay store that outlives its trainer.

The process that sees an event counts it, on its own ledger page: a small file that survives a SIGKILL. No term is
computed as the rest of the equation. So a transition that is counted twice, or not at all, breaks the equation, and
``Balance.check`` finds it. ``balance`` adds up the pages of a run. It compares the page of each producer with those of
its consumers, to find the slots that were posted and not taken, and the transitions that an older copy of a page lacks.
"""

from rlsrl.runtime.ledger.accounts import (
    ACCOUNT_CLOSED,
    ActorLedger,
    BufferLedger,
    ConsumerAccount,
    Held,
    ProducerAccount,
    TrainerLedger,
    starting_record,
)
from rlsrl.runtime.ledger.balance import CHAIN, Balance, balance, settle_ledger
from rlsrl.runtime.ledger.page import MAX_RECORD_BYTES, LedgerPage, page_path, read_page, read_pages
from rlsrl.runtime.ledger.records import (
    DROP_REASONS,
    LOSS_CAUSES,
    LedgerError,
    Mark,
    PageRecord,
    Posted,
    PostedCount,
    ProducerProgress,
    key_of,
)

__all__ = [
    "ACCOUNT_CLOSED",
    "CHAIN",
    "DROP_REASONS",
    "LOSS_CAUSES",
    "MAX_RECORD_BYTES",
    "ActorLedger",
    "Balance",
    "BufferLedger",
    "ConsumerAccount",
    "Held",
    "LedgerError",
    "LedgerPage",
    "Mark",
    "PageRecord",
    "Posted",
    "PostedCount",
    "ProducerAccount",
    "ProducerProgress",
    "TrainerLedger",
    "balance",
    "key_of",
    "page_path",
    "read_page",
    "read_pages",
    "settle_ledger",
    "starting_record",
]
