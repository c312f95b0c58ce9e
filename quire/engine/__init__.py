"""Assembly: the only place where the control plane and the data plane meet,
and where tokens become text."""
