"""Executors: who carries out a step plan. `inline` in this process, `null` without a model."""
