"""From options to decisions: memory, cores, devices and step costs,
computed before anything is allocated."""
