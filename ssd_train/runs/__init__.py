"""What the stages of a run share: its folders and identity, its logger, its sweep, and the plan of what it needs."""
