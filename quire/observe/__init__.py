"""What programs tell people about a run: summaries of requests and of the scheduler's counters."""
