"""How it is minimised: one file per flow; preconditioners and schedules."""
