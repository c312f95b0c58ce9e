"""What the user wishes (`EngineConfig`) and the limits that the control plane works within.
Standard library only."""
