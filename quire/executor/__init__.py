"""Executors: who carries out a step plan. `registry` has them by name: `inline` in this process,
`null` without a model."""
