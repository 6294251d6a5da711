"""What every worker process needs: life cycle, threads, pacing, metrics, logs, ledger, roster."""
